"""A real scheduler, fake workers and a router's engine client in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams

from baton.protos import scheduler_pb2 as pb
from baton.protos import worker_pb2
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.scheduler.worker_session import WorkerSession
from baton.services.engine import wire
from baton.services.engine.args import VLLM_VERSION
from baton.services.router.chronicle import Chronicle
from baton.services.router.cluster import ClusterView
from baton.services.router.metrics import RouterMetrics
from baton.services.router.placement import Placements
from baton.services.router.pool import WorkerPool
from baton.services.router.relay_parts import RelayParts
from baton.services.router.state import JOURNAL_BYTES, Journal
from baton.services.router.suspects import Convicts
from baton.services.router.vllm.block_hashes import PromptHasher
from baton.services.router.vllm.engine_client import RelayClient, RelayLimits, request_digest, request_shape
from baton.services.router.waiting import WaitingRoom
from baton.services.router.worker_stream import WorkerStream
from baton.tasks import stop
from harness.fake_worker import HASHING, MODEL, FakeWorker, until
from harness.scheduling import usual


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    error: Exception | None = None
    outputs: int = 0

    @property
    def over(self) -> bool:
        return bool(self.reason) or self.error is not None


class Members:
    """Registered fake workers, which serve while it is entered."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stack = contextlib.AsyncExitStack()
        self._sessions: dict[str, WorkerSession] = {}
        self.workers: dict[str, FakeWorker] = {}

    async def __aenter__(self) -> Members:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def add(self, worker: FakeWorker) -> FakeWorker:
        await self._stack.enter_async_context(worker)
        client = await self._stack.enter_async_context(SchedulerClient(self._address))
        session = WorkerSession(client, worker.identity, pb.WorkerLoad)
        session.blocks = worker.blocks if worker.role == pb.ROLE_ENCODE else None
        await session.start(5)
        self._stack.push_async_callback(session.close)
        await session.ready(worker.capacity)
        self._sessions[worker.worker_id] = session
        self.workers[worker.worker_id] = worker
        return worker

    async def leave(self, worker: FakeWorker) -> None:
        """Deregister a worker, which continues to serve."""
        await self._sessions[worker.worker_id].close()

    async def lose(self, worker: FakeWorker) -> None:
        """Stop the heartbeats of a worker, which continues to serve."""
        session = self._sessions[worker.worker_id]
        for task in session._tasks:
            await stop(task)
        session._tasks = []


class Cluster:
    """A scheduler, workers, and a router's engine client. Collects the client's outputs by request id."""

    def __init__(self, worker_lease_s: float = 5.0, **limits: Any) -> None:
        self.registry = CollectorRegistry()
        self.failures: dict[str, Exception] = {}
        # idle_decode_tokens 0: decode workers never prefill.
        self._settings = usual(
            address="127.0.0.1:0", placement_lease_s=2.0, idle_decode_tokens=0, worker_lease_s=worker_lease_s
        )
        self._limits = {
            "request_timeout_s": 20.0,
            "max_model_len": 2048,
            "model": MODEL,
            "hasher": PromptHasher(HASHING),
            **limits,
        }
        self._stack = contextlib.AsyncExitStack()
        self.got: dict[str, Answer] = {}
        self._taking: asyncio.Task[None] | None = None
        self._has_scheduler = True

    async def __aenter__(self) -> Cluster:
        self.server = await self._stack.enter_async_context(SchedulerServer(self._settings))
        self.scheduler = SchedulerClient(self.server.address, router_id="r1", policy=self._settings.policy)
        self._stack.push_async_callback(self.scheduler.close)
        self.members = await self._stack.enter_async_context(Members(self.server.address))
        self.remake()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._taking is not None:
            self._taking.cancel()
        self.client.shutdown()
        await self.pool.close()
        await self._stack.aclose()

    def remake(
        self,
        *,
        max_attempts: int = 4,
        silence_s: float = 5.0,
        replace_wait_s: float = 60.0,
        journal: int = JOURNAL_BYTES,
        max_waiting: int = 100,
        max_wait_s: float = 15.0,
        pairs_clock: Callable[[], float] = time.monotonic,
        encode_min_tokens: int = 0,
        **limits: Any,
    ) -> None:
        """Replace the router's parts. Call this before the first request."""
        hello = worker_pb2.HelloRequest(
            router_id="r1", vllm_version=VLLM_VERSION, model=MODEL, protocol=wire.PROTOCOL
        )
        self.registry = CollectorRegistry()
        metrics = RouterMetrics(self.registry)
        self.pool = WorkerPool(hello, wire.decode_outputs, metrics.image_sent, silence_s)
        self.journal = Journal(journal)
        self.view = ClusterView(self.scheduler, self._settings.worker_lease_s, self.pool.reached)
        placements = Placements(self.scheduler, metrics, chosen=self.view.chosen, pairs_clock=pairs_clock)
        self.waiting = WaitingRoom(max_waiting, max_wait_s, metrics)
        self.scheduler.reports.on_released = self.waiting.freed
        self.chronicle = Chronicle(metrics)
        parts = RelayParts(
            placements,
            self.pool,
            metrics,
            self.waiting,
            replace_wait_s,
            self.journal,
            self.chronicle,
            Convicts(request_digest, request_shape),
            max_attempts,
            encode_min_tokens=encode_min_tokens,
        )
        self.counts = parts.counts
        self.client = RelayClient(parts, RelayLimits(**{**self._limits, **limits}))
        self.client.on_failure = self._failed
        if self._taking is not None:
            self._taking.cancel()
        self._taking = asyncio.create_task(self._take())

    async def pair(
        self,
        prefill: int = 1,
        decode: int = 1,
        step_s: float = 0.0,
        max_num_seqs: int = 256,
        connect: bool = True,
    ) -> list[FakeWorker]:
        """Add workers p0, p1, ..., d0, d1, ... and connect the router to them."""
        named = [(f"p{number}", pb.ROLE_PREFILL) for number in range(prefill)]
        named += [(f"d{number}", pb.ROLE_DECODE) for number in range(decode)]
        speed: dict[str, Any] = {"step_s": step_s, "max_num_seqs": max_num_seqs}
        workers = [await self.members.add(FakeWorker(name, role, **speed)) for name, role in named]
        for worker in workers if connect else ():
            await self.connect(worker)
        return workers

    async def send(self, request_id: str, prompt: list[int], max_tokens: int = 8, **params: Any) -> None:
        self.got[request_id] = Answer()
        await self.client.add_request_async(engine_request(request_id, prompt, max_tokens, **params))

    async def connect(self, worker: FakeWorker) -> None:
        connected = asyncio.get_running_loop().create_future()
        known = pb.Worker(worker_id=worker.worker_id, address=worker.address, role=worker.role)
        self.pool.reach(known, connected.set_result)
        assert isinstance(await connected, WorkerStream)

    async def answer(self, request_id: str, timeout_s: float = 15.0) -> Answer:
        await until(lambda: self.got[request_id].over, f"{request_id} ends", timeout_s)
        return self.got[request_id]

    async def ask(self, prompt: list[int], max_tokens: int = 8, **params: Any) -> Answer:
        request_id = f"q{len(self.got)}"
        await self.send(request_id, prompt, max_tokens, **params)
        return await self.answer(request_id)

    async def lose_scheduler(self) -> None:
        """Stop the scheduler."""
        self._has_scheduler = False
        await self.server.__aexit__(None, None, None)

    async def settled(self) -> None:
        """Wait until no request is live in the router or in the scheduler."""
        await until(lambda: self.client.live == 0, "no request is live")
        assert (len(self.journal), self.journal.size, self.journal.images.size) == (0, 0, 0)
        if not self._has_scheduler:
            return
        for _ in range(200):
            description = await self.scheduler.describe()
            if not description.attempts and not any(one.reserved_requests for one in description.workers):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"the scheduler still holds: {description.attempts}")

    def count(self, name: str, **labels: str) -> float:
        """Return one of the router's metrics, 0 if there is no such series."""
        return self.registry.get_sample_value(f"baton_router_{name}", labels) or 0.0

    def _failed(self, request_id: str, error: Exception) -> None:
        self.got[request_id].error = error

    async def _take(self) -> None:
        while True:
            for output in (await self.client.get_output_async()).outputs:
                got = self.got[output.request_id]
                if got.over:
                    got.error = AssertionError("an output after the end")
                got.tokens += output.new_token_ids
                got.outputs += 1
                if output.finish_reason is not None:
                    got.reason = str(output.finish_reason)


def engine_request(request_id: str, prompt: list[int], max_tokens: int, **params: Any) -> Any:
    """Return a request as vLLM's front end makes it."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return wire.new_request(request_id, prompt, sampling, external_req_id=request_id)
