"""Helpers for tests of the scheduler: workers and needs of known size, a real Redis, polling."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from inspect import isawaitable
from pathlib import Path
from typing import Any, Self

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import booking_of
from baton.scheduler.client import Placement, SchedulerClient
from baton.scheduler.ledger import Ledger
from baton.scheduler.need import Need
from baton.scheduler.roster import Roster
from baton.scheduler.types import Booking, Reserved, RouterReport
from baton.scheduler.worker_session import WorkerSession
from baton.services.config import PolicySettings, SchedulerSettings
from harness.support import PATIENCE, eventually, free_port, freeze, listening

LEASE_S = 30.0  # longer than a test


@dataclass
class Options:
    """Scheduler settings with short intervals."""

    address: str = "127.0.0.1:0"
    store: str = "memory"
    topic: str = "test"
    heartbeat_s: float = 0.1
    worker_lease_s: float = 5.0
    placement_lease_s: float = 15.0
    max_queued_prompt_tokens: int = 1_000
    max_queue_factor: float = 2.0
    handoff_min_tokens: int = 0
    idle_decode_tokens: int = 8_192
    prefix_pull_s: float = 0.0
    policy: PolicySettings = field(default_factory=PolicySettings)


LIMITS = Options()


def usual(**changes: Any) -> Options:
    """Return the product's settings with some changed, constants included."""
    made = SchedulerSettings()
    return Options(**{one.name: getattr(made, one.name) for one in fields(Options)} | changes)


def capacity(**changes: object) -> pb.Capacity:
    """Return a capacity of 99 usable blocks of 16 tokens, 4 requests per batch, 1024 tokens per request."""
    values: dict[str, object] = {
        "compatibility_hash": "c0ffee",
        "block_size": 16,
        "num_blocks": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "max_model_len": 1_024,
        "lookahead_tokens": 4,
        "transports": ["shm", "tcp"],
    }
    return pb.Capacity(**(values | changes))  # type: ignore[arg-type]


def identity(
    worker_id: str,
    role: pb.Role = pb.ROLE_MIXED,
    vllm: str = "0.32.0",
    fingerprint: str = "f1",
    **changes: object,
) -> pb.WorkerIdentity:
    return pb.WorkerIdentity(
        worker_id=worker_id,
        role=role,
        address=f"127.0.0.1:{7500 + len(worker_id)}",
        host="here",
        model="tiny",
        model_fingerprint=fingerprint,
        vllm_version=vllm,
        capacity=capacity(**changes),
    )


def need(
    request_id: str = "r",
    epoch: int = 1,
    prompt: int = 100,
    new: int = 10,
    *exclude: str,
    router_id: str = "router",
    **more: Any,
) -> Need:
    return Need(Attempt(request_id, epoch), router_id, prompt, new, exclude=frozenset(exclude), **more)


async def place(
    client: SchedulerClient,
    request_id: str = "r",
    epoch: int = 1,
    prompt: int = 1,
    new: int = 1,
    *exclude: str,
    **more: Any,
) -> Placement:
    asked = need(request_id, epoch, prompt, new, *exclude, router_id=client.router_id, **more)
    return await client.place(asked)


def register(roster: Roster, worker_id: str, role: pb.Role = pb.ROLE_MIXED, **changes: object) -> None:
    refusal = roster.register(identity(worker_id, role, **changes), pb.WORKER_STATE_READY)  # type: ignore[arg-type]
    assert not refusal


def book(roster: Roster, ledger: Ledger, what: Need, decode: str, prefill: str = "") -> Booking:
    """Book `what` on these workers, ignoring their limits."""
    workers = roster.view().workers
    booking = booking_of(what, workers[prefill] if prefill else None, workers[decode])
    ledger.place(booking)
    return booking


def held(bookings: Iterable[Booking]) -> dict[str, Reserved]:
    """Return the sums of these bookings by worker id."""
    total: dict[str, Reserved] = {}
    for booking in bookings:
        for worker_id, share in booking.shares():
            total.setdefault(worker_id, Reserved()).add(share)
    return total


def report(
    *,
    prefilled: list[Attempt] | None = None,
    finished: list[Attempt] | None = None,
    renewed: list[Attempt] | None = None,
    shared: list[tuple[Attempt, int]] | None = None,
) -> RouterReport:
    def wire(attempt: Attempt) -> pb.Attempt:
        return pb.Attempt(request_id=attempt.request_id, epoch=attempt.epoch)

    return RouterReport(
        prefilled=tuple(prefilled or ()),
        finished=tuple(
            (one, pb.Finished(attempt=wire(one), outcome="stop", cost=pb.Cost(output_tokens=7)))
            for one in finished or ()
        ),
        renewed=tuple(renewed or ()),
        shared=tuple(shared or ()),
    )


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Poll until `condition`, or what it returns when awaited, is true. `within_s` is for an idle machine."""
    deadline = time.monotonic() + within_s * PATIENCE
    while not (await found if isawaitable(found := condition()) else found):
        assert time.monotonic() < deadline, "it did not become true in time"
        await asyncio.sleep(0.005)


async def until_told(
    client: SchedulerClient, condition: Callable[[pb.Description], object], within_s: float = 5.0
) -> None:
    """Poll the scheduler's description until `condition` is true of it."""

    async def so() -> object:
        return condition(await client.describe())

    await until(so, within_s)


@asynccontextmanager
async def working(
    client: SchedulerClient,
    who: pb.WorkerIdentity,
    load: Callable[[], pb.WorkerLoad] = pb.WorkerLoad,
    **more: Any,
) -> AsyncIterator[WorkerSession]:
    """Run the session of a worker that is ready."""
    session = WorkerSession(client, who, load, **more)
    await session.start(30)
    try:
        await session.ready(capacity())
        yield session
    finally:
        await session.close()


class Clock:
    """A clock in seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class RedisServer:
    """A redis-server on loopback, without persistence unless `extra` asks for it."""

    def __init__(
        self, folder: Path, *, password: str = "", extra: tuple[str, ...] = (), tls: bool = False
    ) -> None:
        self.folder = folder
        self.password = password
        self.port = free_port()
        self._extra = extra
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        user = f":{self.password}@" if self.password else ""
        return f"{'rediss' if self._tls else 'redis'}://{user}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process, "it does not run"
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        listen = ["--port", "0", "--tls-port", str(self.port)] if self._tls else ["--port", str(self.port)]
        command = ["redis-server", *listen, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), *self._extra]
        if self.password:
            command += ["--requirepass", self.password]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        eventually(lambda: listening(self.port), 10, "redis-server listens", every_s=0.01)

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def hang(self) -> None:
        """Stop the process, with its connections open, until `wake`."""
        freeze(self.pid)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
