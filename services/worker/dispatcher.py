"""Connect the routers' streams with the engine: requests in, outputs and failures back.

Everything runs in the event loop's thread; only `EngineHost` talks to the engine's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from baton.block_log import BlockLogs
from baton.handoff.channels import HandoffClient
from baton.handoff.errors import NotCached
from baton.handoff.reports import Loaded, Problem, Saved
from baton.protos import scheduler_pb2
from baton.protos.handoff_pb2 import EmbeddingManifest, Manifest
from baton.protos.worker_pb2 import (
    PHASE_DECODE,
    PHASE_ENCODE,
    PHASE_PREFILL,
    PHASE_SAVE,
    Complete,
    Failed,
    RunReply,
    Shared,
    Start,
)
from baton.scheduler.types import PlacementLimits
from baton.services.engine import outputs, wire
from baton.services.engine.adapters import AdapterFiles
from baton.services.engine.counts import Counts
from baton.services.engine.errors import RankLost, RequestRefused
from baton.services.engine.host import EngineHost
from baton.services.engine.info import EngineInfo
from baton.services.engine.requests import EngineLimits
from baton.services.engine.step import EngineLoad, EngineStep
from baton.services.errors import describe
from baton.services.roles import Role
from baton.services.worker.admission import Admission
from baton.services.worker.attempts import Attempts, RunningAttempt
from baton.services.worker.drafting import Drafting
from baton.services.worker.encodes import Encodes
from baton.services.worker.engine_gate import EngineGate
from baton.services.worker.entrance import Entrance
from baton.services.worker.grammars import Grammars
from baton.services.worker.incoming import Event, code_of
from baton.services.worker.media import MediaStore
from baton.services.worker.metrics import WorkerMetrics
from baton.services.worker.outgoing import Kept, Outgoing
from baton.services.worker.router_session import RouterSession

logger = logging.getLogger(__name__)

Replies = defaultdict[int, RunReply]  # keyed by the number of the router's stream
_PHASES = frozenset({PHASE_PREFILL, PHASE_DECODE, PHASE_SAVE, PHASE_ENCODE})


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
        """Refuse requests until `open`. `drafting` counts drafts; None without speculative decoding."""
        self.load = EngineLoad()
        self.counts = Counts()  # totals since the engine started
        self.blocks = BlockLogs()  # changes of the engine's prefix cache
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.become(role)
        self._host = host
        self._metrics = metrics
        self._drafting = drafting
        self._attempts = Attempts()
        self._gate = EngineGate(self._attempts, self._move_on)
        self._attempts.on_end = self._ended
        self._admission = Admission(limits)
        self._sessions: dict[int, RouterSession] = {}
        self._next_session = 1  # 0 is vLLM's client index for requests without a client
        self._handoffs = HandoffClient()
        self.outgoing = Outgoing(self._release)
        self.encodes = Encodes(host, self.outgoing, metrics)
        self.images = MediaStore(wire.decode_item)
        self._max_model_len = 0
        self._closed_because = "this worker's engine is still loading"
        self._entrance = Entrance(
            host,
            self._gate,
            grammars,
            metrics,
            fail=self._stop,
            refuse=self.on_refused,
            encoded=self._encoded,
        )

    # Called by the lifecycle.

    def open(self, info: EngineInfo, adapters: Sequence[AdapterFiles] = ()) -> None:
        self.load = EngineLoad(free_blocks=info.free_blocks)
        find, self._max_model_len = self.images.find if info.images else None, info.max_model_len
        limits = (info.max_model_len, info.vocabulary, self._host.block_hasher, info.steps)
        self._entrance.fit(EngineLimits(*limits, adapters, find, info.image_tokens))
        capacity = scheduler_pb2.Capacity(num_blocks=info.num_blocks, max_num_seqs=info.max_num_seqs)
        self._admission.fit(capacity)
        self._closed_because = ""

    def become(self, role: Role) -> None:
        """Change the role. Running requests continue, and requests placed before the change still arrive."""
        self._role = role

    def drain(self) -> None:
        self._closed_because = "this worker is draining"

    @property
    def dummy_steps(self) -> int:
        return self._host.dummy_steps

    @property
    def requests(self) -> int:
        return len(self._attempts)

    @property
    def flushed(self) -> bool:
        return all(session.flushed for session in self._sessions.values())

    @property
    def idle(self) -> bool:
        return not self.requests and self.flushed

    def abort_all(self) -> int:
        """Fail all requests after a drain's timeout, so that they run elsewhere. Return their number."""
        self._move_on(live := self._attempts.all(), "this worker's drain ran out of time")
        return len(live)

    def _move_on(self, attempts: list[RunningAttempt], why: str = "a request is tried alone here") -> None:
        for attempt in attempts:
            self._end(attempt)
        self._fail_all([(attempt, attempt.failed(Failed.CODE_DRAINING, why)) for attempt in attempts])
        self._host.abort([attempt.internal_id for attempt in attempts])

    def hang_up(self) -> None:
        for session in self._sessions.values():
            session.end()
        self.outgoing.hang_up()

    async def renew_leases(self, every_s: float) -> None:
        """Retain saved KV as long as its router is connected and has not released it. Runs until cancelled.

        A request may wait at the decode worker for longer than a lease. After its deadline, its KV's
        lease is no longer renewed: the release must have been lost. Renewals begin every `every_s` seconds,
        however long each takes, so that there is time for another one if one fails.
        """
        while True:
            began = time.monotonic()
            if asked := self.outgoing.to_renew():
                held = await asyncio.to_thread(self._handoffs.renew, asked, every_s)
                self.outgoing.renewed(asked, held, began)
            await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))

    async def close(self) -> None:
        await self._entrance.close()
        self._handoffs.close()

    # Called by the servicer.

    def connect(self, peer: str) -> RouterSession:
        session = RouterSession(self._next_session, peer)
        self._next_session += 1
        self._sessions[session.number] = session
        return session

    def disconnect(self, session: RouterSession) -> None:
        self._sessions.pop(session.number, None)
        attempts = self._attempts.of_session(session.number)
        for attempt in attempts:
            self._end(attempt)
        if attempts:
            logger.info("router %s is gone: %d requests aborted", session.peer, len(attempts))
            self._host.abort([attempt.internal_id for attempt in attempts])
        self.outgoing.release_of_session(session.number)

    def start(self, session: RouterSession, start: Start) -> None:
        attempt = RunningAttempt(
            start.request_id,
            start.epoch,
            start.phase,
            session.number,
            traceparent=start.traceparent,
            alone=start.alone_tokens > 0,
            more_alone=start.more_alone,
            received=session.received,
        )
        try:
            self._admit(attempt, start)
        except RequestRefused as refused:
            if self._attempts.is_live(attempt):
                self._attempts.end(attempt)
            self._turn_away(attempt, refused)

    def abort(self, request_ids: Iterable[str]) -> None:
        engine_ids = []
        for request_id in request_ids:
            attempt = self._attempts.of_request(request_id)
            if attempt is not None:
                self._end(attempt)
                engine_ids.append(attempt.internal_id)
            self.outgoing.release(request_id)
        if engine_ids:
            self._host.abort(engine_ids)

    def _admit(self, attempt: RunningAttempt, start: Start) -> None:
        if self._closed_because:
            raise RequestRefused(Failed.CODE_DRAINING, self._closed_because)
        if start.phase not in _PHASES:
            raise RequestRefused(Failed.CODE_INVALID, f"phase {start.phase} is not known here")
        if (start.phase == PHASE_ENCODE) == self._role.generates:
            raise RequestRefused(Failed.CODE_INVALID, f"this is a worker of role {self._role.name}")
        older = self._attempts.begin(attempt)  # also gives back an older attempt's room
        if older is not None:
            self._host.abort([older.internal_id])
        self.outgoing.supersede(attempt.request_id, attempt.epoch)
        if start.phase != PHASE_DECODE:
            self.outgoing.begin(
                attempt.request_id, attempt.epoch, start.key, attempt.session, start.left_s or math.inf
            )
        attempt.share = self._admission.take(start)
        self._entrance.begin(attempt, start)

    def _stop(self, attempt: RunningAttempt, code: Failed.Code, message: str) -> None:
        self._fail_all([(attempt, self._cut(attempt, code, message))])

    # Called by the engine (engine.step.Listener).

    def on_step(self, step: EngineStep) -> None:
        """Send each router its part of a step's outputs and reports, in one reply."""
        self.load = step.load
        self.counts.add(step.counts)
        if step.blocks:
            self.blocks.take(step.blocks)
        self._metrics.on_step(step)
        drafts = step.counts.drafts
        if self._drafting is not None and step.executed and (self._role.decodes or drafts.drafts):
            self._drafting.on_step(drafts, step.draft_length)
        replies = Replies(RunReply)
        for loaded in step.loaded:
            self._on_loaded(loaded, replies)
        for begun in step.begun:
            if (attempt := self._attempts.live(begun.request_id)) is not None:
                self.outgoing.begun(attempt.request_id, attempt.epoch, begun.manifest)
        saves = {saved.request_id: saved for saved in step.saved}
        for number, batch in step.outputs.items():
            kept = [
                output for output in batch.outputs if self._on_output(output, saves, step.drafts, replies)
            ]
            if kept:
                *first, last = outputs.encode(batch, kept)
                for piece in first:
                    self._send(number, RunReply(engine_outputs=piece))
                replies[number].engine_outputs = last
        for saved in saves.values():
            self._release(saved.manifest)
            self._refuse(saved, replies)
        self._on_step_failed(step, replies)
        for internal_id, blocks in step.shared.items():
            if (attempt := self._attempts.live(internal_id)) is not None:
                self._admission.shared(attempt.share, blocks)
                shared = Shared(request_id=attempt.request_id, epoch=attempt.epoch, blocks=blocks)
                replies[attempt.session].shared.append(shared)
        for number, reply in replies.items():
            self._send(number, reply)

    def _on_step_failed(self, step: EngineStep, replies: Replies) -> None:
        for attempt in filter(None, map(self._attempts.live, step.failed)):
            self._end(attempt)
            failed = attempt.failed(Failed.CODE_ENGINE, step.problem)
            failed.engine_goes_on = True
            replies[attempt.session].failed.append(failed)

    def _on_loaded(self, loaded: Loaded, replies: Replies) -> None:
        attempt = self._attempts.live(loaded.request_id)
        if attempt is None or attempt.incoming is None:
            return
        if loaded.problem is None:
            if attempt.incoming.hear(Event.LOADED):
                self._metrics.on_loaded(loaded)
                replies[attempt.session].admitted.append(outputs.admitted(attempt.prepared, loaded))
        elif attempt.incoming.hear(Event.FAILED):
            # The engine's own error usually comes later and finds the attempt ended. But this may also be a
            # late report of an abandoned load, whose request is in the engine again: so abort it.
            self._metrics.on_not_loaded(loaded.problem)
            self._attempts.end(attempt)
            self._host.abort([attempt.internal_id])
            why = code_of(loaded.problem), str(loaded.problem)
            replies[attempt.session].failed.append(attempt.failed(*why))

    def _refuse(self, saved: Saved, replies: Replies) -> None:
        """Refuse a prompt that was not computed: its KV has no room, or the KV to save is not cached."""
        attempt = self._attempts.live(saved.request_id)
        if attempt is None or saved.problem is None:
            return
        self._no_save(attempt, saved.problem)
        lacks = isinstance(saved.problem.to_error(), NotCached)
        code = Failed.CODE_HANDOFF if lacks else Failed.CODE_STAGING
        self._metrics.on_refused(code)
        replies[attempt.session].failed.append(self._cut(attempt, code, str(saved.problem)))

    def _on_output(
        self, output: Any, saves: dict[str, Saved], drafts: Mapping[str, Sequence[int]], replies: Replies
    ) -> bool:
        """Return whether the output goes to its router. Removes its save from `saves`."""
        attempt = self._attempts.live(output.request_id)
        if attempt is None:
            return False
        if attempt.share.prompt_tokens:
            self._admission.prefilled(attempt.share)
        loads = attempt.incoming is not None and attempt.incoming.loads
        if (found := outputs.failure(output, attempt.prepared, loads=loads)) is not None:
            code, message = found
            if code == Failed.CODE_INVALID:
                self._metrics.on_refused(code)
            replies[attempt.session].failed.append(self._cut(attempt, code, message))
            return False
        if attempt.phase == PHASE_ENCODE:
            replies[attempt.session].saved.append(self.encodes.finished(attempt))
            self._end(attempt)
            return False
        saved = saves.get(output.request_id)
        if not outputs.finish(output, attempt.prepared):
            return True
        proposed = drafts.get(output.request_id, ())
        tokens = output.new_token_ids if attempt.phase != PHASE_SAVE else ()
        ended = outputs.end_of_prefill(
            output, attempt.prepared, saved, self._max_model_len, tokens=tokens, drafts=proposed
        )
        if ended is not None:
            told, end = ended
            replies[attempt.session].saved.append(told)
            self._metrics.on_saved(told)
            if isinstance(end, Complete):
                del saves[attempt.internal_id]
                self.outgoing.complete(attempt.request_id, attempt.epoch, end)
            else:
                self._no_save(attempt, end)
        self._end(attempt)
        return True

    def _encoded(self, attempt: RunningAttempt, manifest: EmbeddingManifest) -> None:
        self._send(attempt.session, RunReply(saved=[self.encodes.told(attempt, manifest, kept=True)]))
        self._end(attempt)

    def _no_save(self, attempt: RunningAttempt, problem: Problem) -> None:
        if attempt.phase != PHASE_DECODE:
            self.outgoing.over(attempt.request_id, attempt.epoch, problem)

    def on_refused(self, internal_id: str, error: Exception) -> None:
        """Tell the router that the engine refuses its request; a refusal by vLLM is final."""
        attempt = self._attempts.live(internal_id)
        if attempt is None:
            return
        self._attempts.end(attempt)
        if not isinstance(error, RequestRefused):
            error = RequestRefused(Failed.CODE_INVALID, f"vLLM refuses it: {describe(error)}")
        self._turn_away(attempt, error)

    def _turn_away(self, attempt: RunningAttempt, refused: RequestRefused) -> None:
        self._metrics.on_refused(refused.code)
        self._fail_all([(attempt, attempt.failed(refused.code, str(refused), refused.images))])

    def on_failure(self, error: BaseException, running: Collection[str] | None = None) -> None:
        """Fail all requests; if a rank was lost, routers of running ones only see their streams end."""
        why = self._closed_because = "this worker's engine failed"
        failed: list[tuple[RunningAttempt, Failed]] = []
        for attempt in self._attempts.all():
            if not attempt.inside or (running is not None and attempt.internal_id not in running):
                failed.append((attempt, attempt.failed(Failed.CODE_DRAINING, why)))
            elif not isinstance(error, RankLost):
                broken = attempt.failed(Failed.CODE_ENGINE, f"the engine failed: {describe(error)}")
                failed.append((attempt, broken))
            self._attempts.end(attempt)
        self._fail_all(failed)
        if not self.failed.done():
            self.failed.set_result(error)

    def _fail_all(self, failed: Iterable[tuple[RunningAttempt, Failed]]) -> None:
        """Send each router all of its failures at once: after the first it may end the stream."""
        replies = Replies(RunReply)
        for attempt, message in failed:
            replies[attempt.session].failed.append(message)
        for number, reply in replies.items():
            self._send(number, reply)

    def _send(self, number: int, reply: RunReply) -> None:
        session = self._sessions.get(number)
        if session is not None:
            session.send(reply)

    def _ended(self, attempt: RunningAttempt) -> None:
        self._admission.give_back(attempt.share)
        self._entrance.ended(attempt)
        if attempt.incoming is not None:
            attempt.incoming.cancel()
        if attempt.phase != PHASE_DECODE:
            self.outgoing.over(attempt.request_id, attempt.epoch)  # no effect if the KV was saved

    def _cut(self, attempt: RunningAttempt, code: Failed.Code, message: str) -> Failed:
        self._end(attempt)
        self._host.abort([attempt.internal_id])
        return attempt.failed(code, message)

    def _end(self, attempt: RunningAttempt) -> None:
        self._attempts.end(attempt)
        if self._drafting is not None:
            self._drafting.on_request(*outputs.drafts_of(attempt.prepared))

    def _release(self, kept: Kept | None) -> None:
        if isinstance(kept, Manifest):
            self._handoffs.release_soon(kept)
        elif kept is not None and self._host.shelf is not None:
            self._host.shelf.release(kept)
