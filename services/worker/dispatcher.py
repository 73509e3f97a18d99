"""The way between the routers' streams and the engine: requests in, outputs and outcomes back.

All of it runs in the loop's thread. The engine's thread is reached through `EngineHost` alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from baton.block_log import BlockLogs
from baton.handoff.channels import HandoffClient
from baton.handoff.errors import NoCommonTransport, NotCached, TransportFailed
from baton.handoff.reports import Begun, Loaded, Saved
from baton.protos import scheduler_pb2
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import (
    PHASE_DECODE,
    PHASE_LOAD,
    PHASE_PREFILL,
    PHASE_SAVE,
    Failed,
    RunReply,
    Shared,
    Start,
)
from baton.protos.worker_pb2 import Begun as BegunMessage
from baton.scheduler.types import PlacementLimits
from baton.services.engine import outputs, requests
from baton.services.engine.adapters import AdapterFiles
from baton.services.engine.build import EngineInfo
from baton.services.engine.counts import Counts
from baton.services.engine.errors import RankLost, RequestRefused
from baton.services.engine.host import EngineHost, EngineLoad, EngineStep
from baton.services.engine.requests import EngineLimits, Prepared
from baton.services.errors import describe
from baton.services.roles import Role
from baton.services.worker.admission import Admission
from baton.services.worker.attempts import Attempts, RunningAttempt
from baton.services.worker.drafting import Drafting
from baton.services.worker.grammars import Grammars
from baton.services.worker.isolation import Isolation
from baton.services.worker.metrics import WorkerMetrics
from baton.services.worker.replies import failure_of, names_of, reply_to
from baton.services.worker.session import RouterSession

logger = logging.getLogger(__name__)

_PHASES = frozenset({PHASE_PREFILL, PHASE_DECODE, PHASE_LOAD, PHASE_SAVE})


class Dispatcher:
    """The requests of one worker. Refuses new ones until `open` and after `drain`."""

    def __init__(
        self,
        role: Role,
        limits: PlacementLimits,
        host: EngineHost,
        metrics: WorkerMetrics,
        drafting: Drafting | None,
        *,
        grammars: Grammars,
    ) -> None:
        """Begin closed. limits: of what is placed here; drafting: counts drafts, None where none are made."""
        self.load = EngineLoad()
        self.counts = Counts()  # since the engine began
        self.blocks = BlockLogs()  # of its prefix cache
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.become(role)
        self._host = host
        self._metrics = metrics
        self._drafting = drafting
        self._attempts = Attempts()
        self._isolation = Isolation(self._attempts, self._move_on)
        self._attempts.on_end = self._ended
        self._admission = Admission(limits)
        self._sessions: dict[int, RouterSession] = {}
        self._next_session = 1  # 0 is vLLM's client index for requests of no client
        self._handoffs = HandoffClient()
        self._limits: EngineLimits | None = None
        self._max_model_len = 0
        self._closed_because = "this worker's engine is still loading"
        self._grammars = grammars
        self._compiling: set[asyncio.Task[None]] = set()

    # Called by the lifecycle.

    def open(self, info: EngineInfo, adapters: Sequence[AdapterFiles] = ()) -> None:
        """Take requests from now on, as the engine is loaded with these adapters."""
        self.load = EngineLoad(free_blocks=info.free_blocks)
        self._limits = EngineLimits(
            info.max_model_len, info.vocabulary, self._host.block_hasher, info.steps, adapters
        )
        self._max_model_len = info.max_model_len
        capacity = scheduler_pb2.Capacity(num_blocks=info.num_blocks, max_num_seqs=info.max_num_seqs)
        self._admission.fit(capacity)
        self._closed_because = ""

    def become(self, role: Role) -> None:
        """Expect other work from now on; what runs goes on, what was placed before still comes."""
        self._role = role

    def drain(self) -> None:
        """Refuse new requests; those that run go on."""
        self._closed_because = "this worker is draining"

    @property
    def requests(self) -> int:
        """The number of requests that run or wait here."""
        return len(self._attempts)

    @property
    def flushed(self) -> bool:
        """Whether no reply waits to be sent."""
        return all(session.flushed for session in self._sessions.values())

    @property
    def idle(self) -> bool:
        """Whether nothing runs here, and all replies were sent."""
        return not self.requests and self.flushed

    def abort_all(self) -> int:
        """Fail all requests, to be run elsewhere, at the end of a drain that took too long.

        Return their number.
        """
        self._move_on(live := self._attempts.all(), "this worker drained, its time was up")
        return len(live)

    def _move_on(self, attempts: list[RunningAttempt], why: str = "a request is tried alone here") -> None:
        """Fail requests, so that they run elsewhere."""
        for attempt in attempts:
            self._end(attempt)
        self._fail_all([(attempt, Failed.CODE_DRAINING, why) for attempt in attempts])
        self._host.abort([attempt.internal_id for attempt in attempts])

    def hang_up(self) -> None:
        """End every router's stream."""
        for session in self._sessions.values():
            session.end()

    async def renew_leases(self, every_s: float, for_s: float) -> None:
        """Keep what was saved for a router for as long as it is connected and wants it; until cancelled.

        The request waits in a queue on the other side, which may be longer than any lease. After `for_s`, as
        long as a router's request may take, a handoff goes: it was pulled, and its release was lost.
        A renewal begins `every_s` after the last one began: one that fails must leave time for another.
        """
        while True:
            began = time.monotonic()
            if asked := self._attempts.to_renew(for_s):
                manifests = [one.manifest for one in asked]
                held = await asyncio.to_thread(self._handoffs.renew, manifests, every_s)
                self._attempts.renewed(asked, held, began)
            await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))

    def close(self) -> None:
        """Close connections. Nothing may be called after it."""
        for task in self._compiling:
            task.cancel()
        self._grammars.close()
        self._isolation.close()
        self._handoffs.close()

    # Called by a router's stream.

    def connect(self, peer: str) -> RouterSession:
        """Take a new stream of a router."""
        session = RouterSession(self._next_session, peer)
        self._next_session += 1
        self._sessions[session.number] = session
        return session

    def disconnect(self, session: RouterSession) -> None:
        """End the requests of a stream that is gone, and release its handoffs."""
        self._sessions.pop(session.number, None)
        attempts = self._attempts.of_session(session.number)
        for attempt in attempts:
            self._end(attempt)
        if attempts:
            logger.info("router %s is gone: %d requests aborted", session.peer, len(attempts))
            self._host.abort([attempt.internal_id for attempt in attempts])
        for saved in self._attempts.take_saved_of_session(session.number):
            self._release(saved.manifest)

    def start(self, session: RouterSession, start: Start) -> None:
        """Begin a phase of an attempt; a refusal goes back as Failed."""
        loading = self._attempts.loading(start.request_id, start.epoch)
        if loading is not None and start.phase == PHASE_DECODE and loading.session == session.number:
            self._go_on(loading, start)
            return
        attempt = RunningAttempt(
            start.request_id,
            start.epoch,
            start.phase,
            session.number,
            loads=start.HasField("manifest"),
            traceparent=start.traceparent,
            alone=start.alone_tokens > 0,
            more_alone=start.more_alone,
        )
        if loading is not None and start.phase == PHASE_DECODE:
            self._end(loading)
            self._host.abort([loading.internal_id])
            self._metrics.on_refused(Failed.CODE_FULL)
            self._fail(attempt, Failed.CODE_FULL, "its KV is still loaded for a stream that was lost")
            return
        try:
            self._admit(attempt, start)
        except RequestRefused as refused:
            if self._attempts.is_live(attempt):
                self._attempts.end(attempt)
            self._metrics.on_refused(refused.code)
            self._fail(attempt, refused.code, str(refused))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests, and release their handoffs."""
        engine_ids = []
        for request_id in request_ids:
            attempt = self._attempts.of_request(request_id)
            if attempt is not None:
                self._end(attempt)
                engine_ids.append(attempt.internal_id)
            saved = self._attempts.take_saved(request_id)
            if saved is not None:
                self._release(saved.manifest)
        if engine_ids:
            self._host.abort(engine_ids)

    def _go_on(self, attempt: RunningAttempt, start: Start) -> None:
        """Go on with an attempt whose KV is here, or comes: its prompt is complete."""
        attempt.phase = PHASE_DECODE
        try:
            give_tokens = requests.resume(attempt.prepared, start)
        except RequestRefused as refused:
            self._end(attempt)
            self._host.abort([attempt.internal_id])
            self._fail(attempt, refused.code, str(refused))
            return
        resume = partial(self._host.resume, attempt.internal_id, attempt.epoch, give_tokens)
        self._isolation.then(attempt, resume)

    def _admit(self, attempt: RunningAttempt, start: Start) -> None:
        if self._closed_because or self._limits is None:
            raise RequestRefused(Failed.CODE_DRAINING, self._closed_because)
        if start.phase not in _PHASES:
            raise RequestRefused(Failed.CODE_INVALID, f"phase {start.phase} is not known here")
        older = self._attempts.begin(attempt)  # which gives back what that one held
        if older is not None:
            self._host.abort([older.internal_id])
        if attempt.epoch > self._attempts.saved_epoch(attempt.request_id):
            saved = self._attempts.take_saved(attempt.request_id)
            if saved is not None:
                self._release(saved.manifest)
        attempt.share = self._admission.take(start)
        attempt.prepared = self._prepare(attempt, start, self._limits)
        if attempt.prepared.request.use_structured_output:
            # The grammar comes first, so that an engine kept empty for a request does not wait for it.
            attempt.grammar = self._spawn(self._enter_with_grammar(attempt, start.party))
        else:
            self._enter(attempt)

    def _enter(self, attempt: RunningAttempt) -> None:
        self._isolation.enter(attempt, lambda: self._host.submit(attempt.prepared.request))

    def _prepare(self, attempt: RunningAttempt, start: Start, limits: EngineLimits) -> Prepared:
        try:
            return requests.prepare(start, attempt.internal_id, attempt.session, limits)
        except RequestRefused:
            raise
        except Exception as error:
            # A request that vLLM cannot build must not take the stream, and all others on it, with it.
            logger.exception("request %s cannot be built", start.request_id, extra=names_of(attempt))
            raise RequestRefused(Failed.CODE_INVALID, f"vLLM refuses it: {describe(error)}") from None

    async def _enter_with_grammar(self, attempt: RunningAttempt, party: int) -> None:
        request, problem = attempt.prepared.request, None
        try:
            await self._grammars.prepare(request, party or -attempt.session)
        except RequestRefused as refused:
            problem = refused
        except Exception as error:  # whatever a grammar's compiler raises: its request would wait for ever
            if not isinstance(error, ValueError):
                logger.exception(
                    "the grammar of request %s cannot be compiled",
                    attempt.request_id,
                    extra=names_of(attempt),
                )
            problem = RequestRefused(Failed.CODE_INVALID, describe(error))
        attempt.grammar = None
        if problem is not None:
            self.on_refused(attempt.internal_id, problem)
        elif self._attempts.is_live(attempt):
            self._enter(attempt)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)
        return task

    # Called by the engine (engine.host.Listener).

    def on_step(self, step: EngineStep) -> None:
        """Sort a step's outputs and reports by router, one reply each."""
        self.load = step.load
        self.counts.add(step.counts)
        if step.blocks:
            self.blocks.take(step.blocks)
        self._metrics.on_step(step)
        drafts = step.counts.drafts
        if self._drafting is not None and step.executed and (self._role.decodes or drafts.drafts):
            self._drafting.on_step(drafts, step.draft_length)
        replies: dict[int, RunReply] = {}
        for loaded in step.loaded:
            self._on_loaded(loaded, replies)
        for begun in step.begun:
            self._on_begun(begun, replies)
        saves = {saved.request_id: saved for saved in step.saved}
        for number, batch in step.outputs.items():
            kept = [
                output for output in batch.outputs if self._on_output(output, saves, step.drafts, replies)
            ]
            if kept:
                *first, last = outputs.encode(batch, kept)
                for piece in first:
                    self._send(number, RunReply(engine_outputs=piece))
                reply_to(replies, number).engine_outputs = last
        for saved in saves.values():
            self._release(saved.manifest)
            self._refuse(saved, replies)
        self._on_step_failed(step, replies)
        for internal_id, blocks in step.shared.items():
            if (attempt := self._attempts.live(internal_id)) is not None:
                self._admission.shared(attempt.share, blocks)
                shared = Shared(request_id=attempt.request_id, epoch=attempt.epoch, blocks=blocks)
                reply_to(replies, attempt.session).shared.append(shared)
        for number, reply in replies.items():
            self._send(number, reply)

    def _on_step_failed(self, step: EngineStep, replies: dict[int, RunReply]) -> None:
        for attempt in filter(None, map(self._attempts.live, step.failed)):
            self._end(attempt)
            failed = failure_of(attempt, Failed.CODE_ENGINE, step.problem)
            failed.engine_goes_on = True
            reply_to(replies, attempt.session).failed.append(failed)

    def _on_begun(self, begun: Begun, replies: dict[int, RunReply]) -> None:
        attempt = self._attempts.live(begun.request_id)
        if attempt is None:
            return  # the engine has heard that it is aborted, and drops what was saved
        self._attempts.saved(attempt, begun.manifest)  # its lease may end before the prompt does
        message = BegunMessage(request_id=attempt.request_id, epoch=attempt.epoch, manifest=begun.manifest)
        reply_to(replies, attempt.session).begun.append(message)

    def _on_loaded(self, loaded: Loaded, replies: dict[int, RunReply]) -> None:
        attempt = self._attempts.live(loaded.request_id)
        if attempt is None:
            return
        self._metrics.on_loaded(loaded)
        reply = reply_to(replies, attempt.session)
        attempt.loads = False
        if loaded.problem is None:
            reply.admitted.append(outputs.admitted(attempt.prepared, loaded))
        else:
            # The engine ends it with an error of its own, which finds the attempt gone; but not where this is
            # told late of a load that was given up, and the attempt was begun again.
            self._attempts.end(attempt)
            self._host.abort([attempt.internal_id])
            # Not where it was only too slow: the next one may be smaller.
            cut = isinstance(loaded.problem.to_error(), TransportFailed | NoCommonTransport)
            code = Failed.CODE_SOURCE if cut else Failed.CODE_HANDOFF
            reply.failed.append(failure_of(attempt, code, str(loaded.problem)))

    def _refuse(self, saved: Saved, replies: dict[int, RunReply]) -> None:
        """Refuse a prompt that was not begun: there is no room for its KV, or it was to be here already."""
        attempt = self._attempts.live(saved.request_id)
        if attempt is None or saved.problem is None:
            return
        self._end(attempt)
        self._host.abort([attempt.internal_id])
        lacks = isinstance(saved.problem.to_error(), NotCached)
        code = Failed.CODE_HANDOFF if lacks else Failed.CODE_STAGING
        self._metrics.on_refused(code)
        reply_to(replies, attempt.session).failed.append(failure_of(attempt, code, str(saved.problem)))

    def _on_output(
        self,
        output: Any,
        saves: dict[str, Saved],
        drafts: Mapping[str, Sequence[int]],
        replies: dict[int, RunReply],
    ) -> bool:
        """Return whether the output goes to its router. Take from `saves` what goes with it."""
        attempt = self._attempts.live(output.request_id)
        if attempt is None:
            return False
        if attempt.share.prompt_tokens:
            self._admission.prefilled(attempt.share)
        if outputs.is_too_large(output):
            self._end(attempt)
            self._host.abort([attempt.internal_id])
            message = (
                f"the log-probabilities of one step take {outputs.size_of(output) >> 20} MiB, and a message "
                f"has room for {outputs.REPLY_BYTES >> 20}: ask for fewer, or send a shorter prompt"
            )
            reply_to(replies, attempt.session).failed.append(
                failure_of(attempt, Failed.CODE_INVALID, message)
            )
            return False
        if attempt.loads and outputs.is_error(output):
            self._attempts.end(attempt)
            message = "the KV cache could not be loaded"
            reply_to(replies, attempt.session).failed.append(
                failure_of(attempt, Failed.CODE_HANDOFF, message)
            )
            return False
        if problem := outputs.grammar_problem(output, attempt.prepared):
            self._end(attempt)
            self._metrics.on_refused(Failed.CODE_INVALID)
            reply_to(replies, attempt.session).failed.append(
                failure_of(attempt, Failed.CODE_INVALID, problem)
            )
            return False
        saved = saves.get(output.request_id)
        if not outputs.finish(output, attempt.prepared):
            return True
        proposed = drafts.get(output.request_id, ())
        ended = outputs.end_of_prefill(output, attempt.prepared, saved, self._max_model_len, proposed)
        if ended is not None:
            reply_to(replies, attempt.session).saved.append(ended)
            if ended.HasField("manifest"):
                del saves[attempt.internal_id]
                self._attempts.saved(attempt, ended.manifest)
            self._metrics.on_saved(ended)
        self._end(attempt)
        return True

    def on_refused(self, internal_id: str, error: Exception) -> None:
        """Tell the router that its request is refused, by vLLM: then no other worker would take it."""
        attempt = self._attempts.live(internal_id)
        if attempt is None:
            return
        self._attempts.end(attempt)
        if isinstance(error, RequestRefused):
            code, message = error.code, str(error)
        else:
            code, message = Failed.CODE_INVALID, f"vLLM refuses it: {describe(error)}"
        self._metrics.on_refused(code)
        self._fail(attempt, code, message)

    def on_failure(self, error: BaseException, running: Collection[str] | None = None) -> None:
        """Tell every router that the engine is lost, and which requests may have caused it.

        If a rank was lost, no request is at fault, and the end of the stream tells the routers.
        """
        why = self._closed_because = "this worker's engine failed"
        failed: list[tuple[RunningAttempt, Failed.Code, str]] = []
        for attempt in self._attempts.all():
            waited = attempt.grammar is not None or self._isolation.waits(attempt)
            if waited or (running is not None and attempt.internal_id not in running):
                failed.append((attempt, Failed.CODE_DRAINING, why))
            elif not isinstance(error, RankLost):
                failed.append((attempt, Failed.CODE_ENGINE, f"the engine failed: {describe(error)}"))
            self._attempts.end(attempt)
        self._fail_all(failed)
        if not self.failed.done():
            self.failed.set_result(error)

    def _fail(self, attempt: RunningAttempt, code: Failed.Code, message: str) -> None:
        self._fail_all([(attempt, code, message)])

    def _fail_all(self, failed: Iterable[tuple[RunningAttempt, Failed.Code, str]]) -> None:
        """Tell each router in one message.

        A router that answers the first of several may never read the others: gRPC drops what a client has not
        read yet once it writes to a stream that has ended.
        """
        replies: dict[int, RunReply] = {}
        for attempt, code, message in failed:
            reply_to(replies, attempt.session).failed.append(failure_of(attempt, code, message))
        for number, reply in replies.items():
            self._send(number, reply)

    def _send(self, number: int, reply: RunReply) -> None:
        session = self._sessions.get(number)
        if session is not None:
            session.send(reply)

    def _ended(self, attempt: RunningAttempt) -> None:
        self._admission.give_back(attempt.share)
        self._isolation.ended(attempt)

    def _end(self, attempt: RunningAttempt) -> None:
        """Forget an attempt that ran, and count its drafts."""
        self._attempts.end(attempt)
        if self._drafting is not None:
            self._drafting.on_request(*outputs.drafts_of(attempt.prepared))

    def _release(self, manifest: Manifest | None) -> None:
        if manifest is not None:
            self._handoffs.release_soon(manifest)
