"""A router's process for bench/scheduler_cpu.py: it places at an even rate, and reports, as a router does.

    python -m bench.scheduler_client ADDRESS NAME RATE

Once all is imported it prints READY, and reads BEGIN, FROM and UNTIL from stdin: when it begins to place, and
between which moments it measures, of time.monotonic, which all processes of a machine share. It prints its
figures as JSON, those of itself included: where this process had no time left, a placement's latency is its
own and not the scheduler's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import uvloop

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.tasks import spawn, stop
from harness.scheduling import place

READY = "ready"
LIVES_S = 2.0  # a request; its prompt is prefilled after a tenth of that
TICK_S = 0.01
SNAPSHOT_S = 1.0  # a router asks for one as often, to place alone where no scheduler answers
MOST_OPEN = 2_500  # placements under way here; more means that the scheduler does not keep up


@dataclass
class Load:
    """A router's placements, and their outcomes."""

    client: SchedulerClient
    rate: float  # requests a second
    since: float  # time.monotonic: what was sent from then on, and before `until`, is measured
    until: float
    asked: int = 0
    took: list[float] = field(default_factory=list)  # s, of placements
    late: list[float] = field(default_factory=list)  # s, by which this process woke up after its time
    failures: Counter[str] = field(default_factory=Counter)
    open: int = 0

    async def hold(self, begin: float) -> float:
        """Place at the rate until the end, and wait for the last ones. Return the CPU seconds measured."""
        await asyncio.sleep(begin - time.monotonic())
        sent, cpu_s = 0, 0.0
        running: set[asyncio.Task[None]] = set()
        while (now := time.monotonic()) < self.until:
            if not cpu_s and now >= self.since:
                cpu_s = time.process_time()
            while sent < int((now - begin) * self.rate):
                sent += 1
                task = asyncio.create_task(self._one())
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(TICK_S)
            if now >= self.since:
                self.late.append(time.monotonic() - now - TICK_S)
        cpu_s = time.process_time() - cpu_s
        await asyncio.gather(*running)
        return cpu_s

    async def _one(self) -> None:
        measured = time.monotonic() >= self.since
        self.asked += measured
        if self.open >= MOST_OPEN:
            self._fail(measured, f"{MOST_OPEN} are under way")
            return
        self.open += 1
        began = time.perf_counter()
        try:
            placed = await place(self.client, uuid.uuid4().hex, 1, 500, 200)
        except SchedulerError as error:
            self._fail(measured, type(error).__name__)
            return
        finally:
            self.open -= 1
        if measured:
            self.took.append(time.perf_counter() - began)
        await asyncio.sleep(LIVES_S / 10)
        self.client.reporter.prefilled(placed.attempt)
        await asyncio.sleep(LIVES_S * 9 / 10)
        self.client.reporter.finished(placed.attempt, "stop", pb.Cost(decode_ms=1.0))

    def _fail(self, measured: bool, why: str) -> None:
        if measured:
            self.failures[why] += 1


async def look(client: SchedulerClient) -> None:
    """Get snapshots, for ever."""
    while True:
        with contextlib.suppress(SchedulerError):  # the next one will do
            await client.refresh()
        await asyncio.sleep(SNAPSHOT_S)


async def run(
    address: str, name: str, rate: float, begin: float, since: float, until: float
) -> dict[str, Any]:
    """Place, and return the figures."""
    async with SchedulerClient(address, router_id=name) as client:
        load = Load(client, rate, since, until)
        looking = spawn(look(client), "snapshots")
        cpu_s = await load.hold(begin)
        await stop(looking)
        dropped = client.reporter.dropped
    return {
        "asked": load.asked,
        "took": [round(one, 5) for one in load.took],
        "late": [round(one, 5) for one in load.late],
        "failures": dict(load.failures),
        "dropped": dropped,
        "cpu_s": cpu_s,
    }


if __name__ == "__main__":
    address, name, rate = sys.argv[1:]
    print(READY, flush=True)
    times = map(float, sys.stdin.readline().split())
    print(json.dumps(uvloop.run(run(address, name, float(rate), *times))))
