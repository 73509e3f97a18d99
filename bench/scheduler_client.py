"""Run the clients of bench/scheduler.py: routers that place and report, and workers that send heartbeats.

    python -m bench.scheduler_client routers ADDRESS NAME ROUTERS RATE BEGIN SECONDS
    python -m bench.scheduler_client workers ADDRESS PAIRS

BEGIN is a time.monotonic, which all processes of a machine share. The routers place at RATE together, then as
fast as they can; each has its own connection to each scheduler and polls snapshots. Their figures are printed
as JSON, including how late this process woke up: if it lags, placement times are not the scheduler's. Workers
print "ready" once all are ready.

Import only modules that older versions of the product have: this file also measures other checkouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import uvloop

from baton import rpc
from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import Placement, SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.scheduler.need import Need
from baton.scheduler.worker_session import WorkerSession
from baton.services.imports import collect_seldom
from baton.tasks import spawn, stop

WARM_S = 2.0  # the beginning of each part is not measured
BETWEEN_S = 4.0  # pause in which the first part's requests end
LIVES_S = 2.0  # life of a request in the first part; a tenth of it is prefill
AT_ONCE = 32  # concurrent placements of this process in the second part, at least one per router
SNAPSHOT_S = 1.0
MOST_OPEN = 2_500  # limit on requests waiting for a placement; beyond it the scheduler cannot keep up
START_S = 20.0
STARTED_AT_ONCE = 50  # workers started at a time
PROMPT, ANSWER = 500, 200  # tokens


@dataclass
class Part:
    """Placements between two times of time.monotonic. Durations are in seconds."""

    since: float
    until: float
    took: list[float] = field(default_factory=list)  # the time of each placement
    own: list[float] = field(default_factory=list)  # the scheduler's share of it
    late: list[float] = field(default_factory=list)  # this process's delays in waking up
    failures: Counter[str] = field(default_factory=Counter)

    def told(self) -> dict[str, Any]:
        rounded = {key: [round(one, 6) for one in getattr(self, key)] for key in ("took", "own", "late")}
        return {**rounded, "failures": dict(self.failures)}


class Router:
    """A router that places and reports."""

    def __init__(self, address: str, name: str) -> None:
        self._client = SchedulerClient(address, router_id=name)
        self._looking: asyncio.Task[None] | None = None
        self._open = 0

    async def __aenter__(self) -> Router:
        self._looking = spawn(self._look(), "snapshots")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._looking is not None:
            await stop(self._looking)
        await self._client.close()

    async def hold(self, rate: float, begin: float, part: Part) -> None:
        """Place at a fixed rate, whatever happens to earlier requests."""
        due, running = begin, set[asyncio.Task[None]]()
        while (due := due + random.expovariate(rate)) < part.until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if due >= part.since:
                part.late.append(time.monotonic() - due)
            task = asyncio.create_task(self._live(part))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def haste(self, begin: float, part: Part) -> None:
        """Place one request after another."""
        await asyncio.sleep(begin - time.monotonic())
        while time.monotonic() < part.until:
            if placed := await self._place(part):
                self._client.reports.prefilled(placed.attempt)
                self._client.reports.finished(placed.attempt, "stop", pb.Cost(decode_ms=1.0))
            else:
                await asyncio.sleep(0.01)

    async def _live(self, part: Part) -> None:
        if placed := await self._place(part):
            await asyncio.sleep(LIVES_S / 10)
            self._client.reports.prefilled(placed.attempt)
            await asyncio.sleep(LIVES_S * 9 / 10)
            self._client.reports.finished(placed.attempt, "stop", pb.Cost(decode_ms=1.0))

    async def _place(self, part: Part) -> Placement | None:
        if self._open >= MOST_OPEN:
            part.failures[f"{MOST_OPEN} wait"] += 1
            return None
        self._open += 1
        need = Need(Attempt(uuid.uuid4().hex, 1), self._client.router_id, PROMPT, ANSWER)
        began = time.perf_counter()
        measured = part.since <= time.monotonic() < part.until
        try:
            placed = await self._client.place(need)
        except SchedulerError as error:
            part.failures[type(error).__name__] += measured
            return None
        finally:
            self._open -= 1
        if measured:
            part.took.append(time.perf_counter() - began)
            part.own.append(placed.scheduler_s)
        return placed

    async def _look(self) -> None:
        await asyncio.sleep(random.random() * SNAPSHOT_S)
        while True:
            with contextlib.suppress(SchedulerError):  # tried again below
                await self._client.refresh()
            await asyncio.sleep(SNAPSHOT_S)


def parts_of(begin: float, seconds: float) -> tuple[Part, Part]:
    """Return the two parts of a measurement: at a rate, and as fast as possible."""
    since = begin + WARM_S
    again = since + seconds + BETWEEN_S + WARM_S
    return Part(since, since + seconds), Part(again, again + seconds)


async def routers(address: str, name: str, many: int, rate: float, begin: float, seconds: float) -> None:
    """Run `many` routers and print their figures."""
    held, hasty = parts_of(begin, seconds)
    async with contextlib.AsyncExitStack() as stack:
        all_ = [await stack.enter_async_context(Router(address, f"{name}-{n}")) for n in range(many)]
        await asyncio.sleep(begin - time.monotonic())
        await asyncio.gather(*(one.hold(rate / many, begin, held) for one in all_))
        each = max(1, AT_ONCE // many)
        await asyncio.gather(*(one.haste(hasty.since - WARM_S, hasty) for one in all_ for _ in range(each)))
    print(json.dumps([held.told(), hasty.told()]))


async def workers(address: str, pairs: int) -> None:
    """Send heartbeats of `pairs` prefill and `pairs` decode workers until the process ends."""
    async with SchedulerClient(address) as client:
        sessions = [_session(client, number) for number in range(2 * pairs)]
        for at in range(0, len(sessions), STARTED_AT_ONCE):
            await asyncio.gather(*map(_start, sessions[at : at + STARTED_AT_ONCE]))
        print("ready", flush=True)
        await asyncio.Event().wait()


async def _start(session: WorkerSession) -> None:
    await session.start(START_S)
    await session.ready(_capacity())


def _session(client: SchedulerClient, number: int) -> WorkerSession:
    identity = pb.WorkerIdentity(
        worker_id=f"worker-{number}",
        role=pb.ROLE_PREFILL if number % 2 else pb.ROLE_DECODE,
        address="127.0.0.1:1",
        model="bench",
    )
    load = pb.WorkerLoad(free_blocks=10**6)
    return WorkerSession(client, identity, lambda: load)


def _capacity() -> pb.Capacity:
    return pb.Capacity(
        compatibility_hash="aa",
        block_size=16,
        num_blocks=10**6,
        max_num_seqs=10**4,
        max_model_len=8_192,
        lookahead_tokens=4,
        transports=["shm"],
    )


def main(kind: str, address: str, *rest: str) -> None:
    collect_seldom()  # as the product's processes do
    # Otherwise the routers of this process would share a connection.
    rpc.CHANNEL_OPTIONS.append(("grpc.use_local_subchannel_pool", 1))
    if kind == "workers":
        uvloop.run(workers(address, int(rest[0])))
        return
    name, many, *numbers = rest
    rate, begin, seconds = map(float, numbers)
    uvloop.run(routers(address, name, int(many), rate, begin, seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
