"""A worker without an engine: the real gRPC service and messages, with tokens from a formula.

It fails on demand: see `Fault`. An output token depends only on the prompt and its position, so a request
that was resumed elsewhere must still output `answer(...)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from baton.attempts import attempt_id
from baton.block_log import BlockLogs, Change
from baton.handoff.errors import NothingSaved
from baton.handoff.reports import Problem
from baton.prefix_keys import image_key
from baton.protos import handoff_pb2, scheduler_pb2, worker_pb2, worker_pb2_grpc
from baton.rpc import SERVER_OPTIONS
from baton.services.engine import wire
from baton.services.engine.args import VLLM_VERSION
from baton.services.worker.following import Following
from baton.services.worker.incoming import code_of
from baton.services.worker.outgoing import NotFollowedError, Outgoing
from harness.fake_request import EOS as EOS
from harness.fake_request import LEASE_S, Running, source_end
from harness.fake_request import Fault as Fault
from harness.fake_request import answer as answer
from harness.support import PATIENCE

HEARTBEAT_S = 0.05
MODEL = "tiny"
BLOCK_SIZE = 16
HASHING = scheduler_pb2.BlockHashing(tokens=BLOCK_SIZE, every=1, algorithm="sha256", root=bytes(32))


@dataclass
class Seen:
    starts: list[worker_pb2.Start] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    extra_args: list[Any] = field(default_factory=list)
    media: list[worker_pb2.Media] = field(default_factory=list)


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """A worker that serves inside its `async with`.

    An engine step takes `step_s` and generates a token for each running request of one router.
    """

    def __init__(
        self, worker_id: str, role: scheduler_pb2.Role, *, step_s: float = 0.0, max_num_seqs: int = 256
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.model = MODEL
        self.step_s = step_s
        self.late_s = 0.0  # age of outputs when they are sent
        self.wire_s = 0.0  # delay of messages
        self.max_num_seqs = max_num_seqs
        self.max_model_len = 2048
        self.refusal = ""
        self.gang: scheduler_pb2.Gang | None = None
        self.address = ""
        self.seen = Seen()
        self.faults: deque[Fault] = deque()
        self.model_fingerprint = "f1"
        self.vllm_version = VLLM_VERSION
        self.speculative_method = ""
        self.adapters: dict[str, str] = {}
        self.drafts: Any = None  # vLLM's RequestSpecDecodeMetrics, sent with each output
        self.eos_at: int | None = None  # position of an end-of-sequence token in the output
        self.script: list[int] = []  # output tokens before an end of sequence; empty: use the formula
        self.per_step = 1  # output tokens per request and decode step
        self.before_step: Callable[[], None] = lambda: None
        self._server: grpc.aio.Server | None = None
        self._running: dict[str, Running] = {}
        self._on_the_way: list[Running] = []  # aborted requests whose last token is still in flight
        self.most: int | None = None  # concurrent requests; further ones are refused as full
        self.fullest = 0  # highest number of concurrent requests
        self.hangs = False
        self.protocol = wire.PROTOCOL
        self.shares = 0  # KV blocks that each request shares with other requests
        self.steps = 1  # steps of a prefill; KV can be pulled after the first of several
        self.patience_s = 1.0  # how long a prefill waits for a pulled prefix
        self._outgoing = Outgoing(lambda _: None)
        self._following = Following()
        self.images: set[str] = set()  # names of the images that it got
        self.shelf: set[str] = set()  # names of the images whose embeddings it keeps
        self.blocks = BlockLogs()
        self.cached = False  # pretend that every prompt is cached, and follow no encodes

    @property
    def identity(self) -> scheduler_pb2.WorkerIdentity:
        return scheduler_pb2.WorkerIdentity(
            worker_id=self.worker_id,
            role=self.role,
            address=self.address,
            host="here",
            model=self.model,
            model_fingerprint=self.model_fingerprint,
            vllm_version=self.vllm_version,
            capacity=self.capacity,
            gang=self.gang,
        )

    @property
    def capacity(self) -> scheduler_pb2.Capacity:
        return scheduler_pb2.Capacity(
            compatibility_hash="c1",
            block_size=BLOCK_SIZE,
            num_blocks=100_000,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=2048,
            max_model_len=self.max_model_len,
            lookahead_tokens=1,
            transports=["shm"],
            speculative_method=self.speculative_method,
            adapters=self.adapters,
        )

    def go_on(self, fault: Fault | None = None) -> None:
        """Let silent requests continue to `fault`, or to their end."""
        for one in self._running.values():
            one.silent, one.fault = False, fault
            one.work.set()

    @property
    def running(self) -> list[str]:
        return list(self._running)

    async def __aenter__(self) -> FakeWorker:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Reset all connections, as if the process were killed."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
            await self._following.close()

    # -- the service

    async def Hello(self, request: Any, context: Any) -> worker_pb2.HelloReply:
        del request, context
        if self.hangs:
            await asyncio.Event().wait()  # until the call's deadline
        return worker_pb2.HelloReply(refusal=self.refusal, identity=self.identity, protocol=self.protocol)

    async def Run(self, requests: Any, context: Any) -> None:
        work = asyncio.Event()
        engine = asyncio.create_task(self._engine(context, work))
        try:
            async for message in requests:
                if message.HasField("start"):
                    self._begin(message.start, work)
                elif message.HasField("media"):
                    self.seen.media.append(message.media)
                    self.images.add(message.media.identifier)
                else:
                    self._abort(message.abort.request_ids)
        finally:
            engine.cancel()
            for request_id, one in self._of(work).items():
                self._running.pop(request_id).leave()
                self._over(one.start, "its router has gone")
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await engine

    async def Follow(self, request: Any, context: Any) -> None:
        try:
            with self._outgoing.follower(request) as follower:
                more = True
                while more:
                    reply = await follower.next()
                    if self.hangs:
                        await asyncio.Event().wait()  # until the call ends
                    await context.write(reply)
                    more = reply.HasField("begun")
        except NotFollowedError as error:
            await context.abort(error.code, str(error))

    def _of(self, work: asyncio.Event) -> dict[str, Running]:
        return {request_id: one for request_id, one in self._running.items() if one.work is work}

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.seen.aborts.append(request_id)
            aborted = self._running.pop(request_id, None)
            if aborted is not None:
                self._drop(aborted)

    def _drop(self, one: Running) -> None:
        """Drop a request that is aborted or replaced."""
        one.leave()
        self._over(one.start, "it was aborted")
        if one.fault is not None and one.fault.crosses:
            self._on_the_way.append(one)

    def _over(self, start: worker_pb2.Start, why: str) -> None:
        self._outgoing.over(start.request_id, start.epoch, Problem.of(NothingSaved(why)))

    def _begin(self, start: worker_pb2.Start, work: asyncio.Event) -> None:
        self.seen.starts.append(start)
        request = wire.decode_request(start.engine_request)
        if start.key:
            self._outgoing.begin(start.request_id, start.epoch, start.key, id(work), math.inf)
        replaced = self._running.get(start.request_id)
        if replaced is not None:
            self._drop(replaced)
        self.seen.extra_args.append(request.sampling_params.extra_args)
        fault = self.faults.popleft() if self.faults and self.faults[0].phase == start.phase else None
        taken = sum(not (one.fault and one.fault.failed) for one in self._running.values())
        if self.most is not None and taken >= self.most and replaced is None:
            fault = Fault(start.phase, failed=worker_pb2.Failed.CODE_FULL)
        else:
            self.fullest = max(self.fullest, taken + (replaced is None))
        one = self._running[start.request_id] = Running(
            work=work,
            start=start,
            prompt=request.prompt_token_ids,
            max_tokens=request.sampling_params.max_tokens,
            eos_at=self.eos_at,
            generated=len(start.output_token_ids),
            fault=fault,
            steps=self.steps if start.phase == worker_pb2.PHASE_PREFILL else 1,
        )
        if start.HasField("source") or (start.encoded and not self.cached):
            one.following = asyncio.create_task(self._follow(one))
        if start.phase == worker_pb2.PHASE_ENCODE:
            one.image = request.mm_features[0].identifier
            if one.image not in self.images | self.shelf:
                one.missing = worker_pb2.Failed.CODE_MEDIA, "the image is not here"
        work.set()

    async def _follow(self, one: Running) -> None:
        """Wait until a request's images and source are complete; for a pulled prefix at most patience_s."""
        patience_s = self.patience_s if one.start.phase == worker_pb2.PHASE_PREFILL else None
        start = one.start
        for encoded in () if self.cached else start.encoded:
            came = await source_end(self._following, encoded.source, start.epoch)
            if isinstance(came, Problem) or came.embedding.identifier != encoded.identifier:
                text = f"the image {encoded.identifier} did not come"
                one.missing = worker_pb2.Failed.CODE_MEDIA, text
        if start.HasField("source"):
            came = await source_end(self._following, start.source, start.epoch, patience_s)
            if isinstance(came, Problem):
                one.missing = code_of(came), came.text
            else:
                one.loads = came
                one.generated += len(came.token_ids)
        one.following = None
        one.queued = time.monotonic()
        one.work.set()

    # -- the engine

    async def _engine(self, context: Any, work: asyncio.Event) -> None:
        while True:
            try:
                await asyncio.wait_for(work.wait(), HEARTBEAT_S)
            except TimeoutError:
                if not self.hangs:
                    await context.write(worker_pb2.RunReply())
                continue
            if not any(one.ready for one in self._of(work).values()):
                work.clear()
                continue
            began = time.monotonic()
            self.before_step()
            reply, dies = self._step(work)
            if self.hangs:
                work.clear()
                continue
            if dies:
                asyncio.get_running_loop().create_task(self.die())
                return
            await asyncio.sleep(self.wire_s)
            await context.write(reply)
            await asyncio.sleep(max(0.0, self.step_s - (time.monotonic() - began)))

    def _step(self, work: asyncio.Event) -> tuple[worker_pb2.RunReply, bool]:
        reply = worker_pb2.RunReply()
        outputs: list[Any] = []
        dies = False
        while self._on_the_way:
            late = self._on_the_way.pop()
            self._generate(late.start.request_id, late, outputs, reply)
        for request_id, one in self._of(work).items():
            if not one.ready:
                continue
            if one.fault is not None and one.steps == 1 and one.generated_here >= one.fault.after_tokens:
                dies |= self._fail(request_id, one, one.fault, outputs, reply)
            elif one.missing is not None and one.needs_it:
                self._running.pop(request_id, None)
                self._refuse(one, *one.missing, reply)
            elif one.image:
                self._running.pop(request_id, None)
                self._encode(one, one.image, reply)
            else:
                self._generate(request_id, one, outputs, reply)
        if outputs:
            step = EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic() - self.late_s)
            reply.engine_outputs = wire.encode_outputs(step)
        return reply, dies

    def _generate(
        self, request_id: str, one: Running, outputs: list[Any], reply: worker_pb2.RunReply
    ) -> None:
        start = one.start
        if one.steps > 1:
            if one.steps == self.steps:
                self._outgoing.begun(request_id, start.epoch, one.manifest(self.worker_id))
            one.steps -= 1
            return
        if one.generated_here == 0 and one.loads is not None:
            self._load(one, one.loads, reply)
        if one.generated_here == 0 and self.shares and start.phase == worker_pb2.PHASE_DECODE:
            reply.shared.add(request_id=request_id, epoch=start.epoch, blocks=self.shares)
        first = one.generated_here == 0
        prefills = start.phase in (worker_pb2.PHASE_PREFILL, worker_pb2.PHASE_SAVE)
        tokens = one.next_tokens(1 if prefills else self.per_step, self.script)
        ends = tokens[-1] == EOS
        one.generated += len(tokens)
        one.generated_here += len(tokens)
        reason = None  # a request that is prefilled continues elsewhere
        if ends:
            reason = FinishReason.STOP
        elif one.generated >= one.max_tokens or one.generated_here == start.alone_tokens > 0:
            reason = FinishReason.LENGTH
        outputs.append(
            EngineCoreOutput(
                request_id=attempt_id(request_id, start.epoch),
                new_token_ids=tokens,
                finish_reason=reason,
                spec_decode_metrics=self.drafts,
                events=one.events(self.step_s) if first else None,
            )
        )
        if prefills or reason is not None:
            self._running.pop(request_id, None)
        if prefills:
            self._save(one, tokens, reply, over=ends or one.generated >= one.max_tokens)

    def _encode(self, one: Running, image: str, reply: worker_pb2.RunReply) -> None:
        """Keep an image's embeddings, and tell its router, followers and the scheduler."""
        start = one.start
        self.shelf.add(image)
        self.blocks.take(Change(stored=[image_key(image)]))
        manifest = handoff_pb2.EmbeddingManifest(identifier=image, worker_id=self.worker_id, lease_s=LEASE_S)
        self._outgoing.complete(start.request_id, start.epoch, worker_pb2.Complete(embedding=manifest))
        reply.saved.add(request_id=start.request_id, epoch=start.epoch)

    def _save(self, one: Running, tokens: list[int], reply: worker_pb2.RunReply, *, over: bool) -> None:
        """Save a prompt's KV, unless the request is `over`, and tell its followers."""
        start = one.start
        saved = reply.saved.add(request_id=start.request_id, epoch=start.epoch)
        if over:
            saved.problem = "the request has ended"
        elif one.fault is not None and one.fault.not_kept:
            saved.problem = "no room"
        if saved.problem:
            self._over(start, saved.problem)
            return
        saved.saved_at_s = time.monotonic()
        saved.save_ms = 0.1
        saved.chunks = self.steps
        first = tokens if start.phase == worker_pb2.PHASE_PREFILL else []
        complete = worker_pb2.Complete(manifest=one.manifest(self.worker_id), token_ids=first)
        self._outgoing.complete(start.request_id, start.epoch, complete)

    @staticmethod
    def _load(one: Running, loads: worker_pb2.Complete, reply: worker_pb2.RunReply) -> None:
        reply.admitted.add(
            request_id=one.start.request_id,
            epoch=one.start.epoch,
            transport="shm",
            bytes=1000,
            total_ms=1.0,
            tokens=loads.manifest.num_tokens,
        )

    def _refuse(
        self, one: Running, code: worker_pb2.Failed.Code, message: str, reply: worker_pb2.RunReply
    ) -> None:
        start = one.start
        self._over(start, message)
        one.leave()
        reply.failed.add(
            request_id=start.request_id,
            epoch=start.epoch,
            code=code,
            message=message,
            engine_goes_on=one.fault is not None and one.fault.goes_on,
            images=one.fault.images if one.fault is not None else (),
        )

    def _fail(
        self, request_id: str, one: Running, fault: Fault, outputs: list[Any], reply: worker_pb2.RunReply
    ) -> bool:
        """Carry out the fault. Return whether the worker dies."""
        if fault.not_kept:
            self._generate(request_id, one, outputs, reply)
            return False
        if fault.hang:
            self.hangs = True
            return False
        if fault.silent:
            one.silent = True
            if fault.loaded and one.loads is not None:
                self._load(one, one.loads, reply)
            return False
        self._running.pop(request_id, None)
        if fault.failed is not None:
            self._refuse(one, fault.failed, "the test wants it", reply)
        elif fault.end_with is not None:
            name = attempt_id(request_id, one.start.epoch)
            outputs.append(EngineCoreOutput(request_id=name, new_token_ids=[], finish_reason=fault.end_with))
        return fault.die


async def until(look: Callable[[], Any], what: str, timeout_s: float = 5.0) -> None:
    """Poll until `look()` is true. Raises an AssertionError that names `what` after timeout_s * PATIENCE."""
    deadline = time.monotonic() + timeout_s * PATIENCE
    while not look():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s * PATIENCE:g} s: {what}")
        await asyncio.sleep(0.005)
