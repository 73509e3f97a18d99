"""The CPU time of a scheduler's process while requests are placed, prefilled and finished at a rate.

A real `baton scheduler` over a real Redis, each a process of its own; the routers are in this one. Requests
come evenly, whatever happens to earlier ones, and each lives for `LIVES_S`. The scheduler and its Redis
remember a request for a minute after its end: the measurement begins after that, or in the middle of a
shorter run.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.scheduler.keys import EPOCH_KEEP_MS
from harness.support import ROOT, eventually, free_port, listening, redis_server

LIVES_S = 2.0  # a request; its prompt is prefilled after a tenth of that
TICK_S = 0.01
START_S = 20.0
MOST_OPEN = 5_000  # requests under way here; more means that the scheduler does not keep up


@dataclass
class Load:
    """A router's placements, and their outcomes."""

    rate: int  # requests a second
    latencies: list[float] = field(default_factory=list)  # s, of placements
    failed: int = 0
    open: int = 0

    async def hold(self, client: SchedulerClient, seconds: float) -> None:
        """Place at the rate for so many seconds, then wait until the last requests end."""
        began = time.monotonic()
        sent = 0
        running: set[asyncio.Task[None]] = set()
        while (past := time.monotonic() - began) < seconds:
            due = int(past * self.rate)
            while sent < due:
                sent += 1
                if self.open >= MOST_OPEN:
                    self.failed += 1
                    continue
                task = asyncio.create_task(self._one(client))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(TICK_S)
        await asyncio.gather(*running)

    async def _one(self, client: SchedulerClient) -> None:
        self.open += 1
        began = time.perf_counter()
        try:
            placed = await client.place(uuid.uuid4().hex, 1, prompt_tokens=500, max_new_tokens=200)
        except SchedulerError:
            self.failed += 1
            return
        finally:
            self.open -= 1
        self.latencies.append(time.perf_counter() - began)
        await asyncio.sleep(LIVES_S / 10)
        client.reporter.prefilled(placed.attempt)
        await asyncio.sleep(LIVES_S * 9 / 10)
        client.reporter.finished(placed.attempt, "stop", pb.Cost(decode_ms=1.0))


def measure(
    rate: int, hold_s: float, workers: list[pb.WorkerIdentity], code: Path = ROOT
) -> dict[str, float]:
    """Measure the scheduler of the checkout `code` under this load."""
    redis_port, port = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    with (
        redis_server(redis_port) as redis,
        _scheduler(code, address, f"redis://127.0.0.1:{redis_port}/0") as own,
    ):
        return asyncio.run(
            _measure(rate, hold_s, workers, address, psutil.Process(own), psutil.Process(redis.pid))
        )


async def _measure(
    rate: int,
    hold_s: float,
    workers: list[pb.WorkerIdentity],
    address: str,
    scheduler: psutil.Process,
    redis: psutil.Process,
) -> dict[str, float]:
    warm_s = min(EPOCH_KEEP_MS / 1_000, hold_s / 2)
    async with SchedulerClient(address, router_id="bench") as client:
        for identity in workers:
            await client.register(identity, pb.WORKER_STATE_READY)
        load = Load(rate)
        asking = asyncio.create_task(load.hold(client, hold_s))
        await asyncio.sleep(warm_s)
        load.latencies.clear()
        before, began = (_cpu_s(scheduler), _cpu_s(redis)), time.monotonic()
        await asyncio.sleep(max(0.0, hold_s - warm_s))
        placed, took_s = len(load.latencies), time.monotonic() - began
        after = (_cpu_s(scheduler), _cpu_s(redis))
        await asking
        dropped = client.reporter.dropped
    if dropped:
        raise SystemExit(f"{dropped} reports were dropped: no figure means anything")
    cuts = statistics.quantiles([1_000 * one for one in load.latencies], n=100)
    return {
        "asked_per_s": rate,
        "placed_per_s": round(placed / took_s),
        "failed": load.failed,  # above 0 it could not keep up
        "scheduler_cores": round((after[0] - before[0]) / took_s, 3),
        "redis_cores": round((after[1] - before[1]) / took_s, 3),
        "place_p50_ms": round(cuts[49], 2),
        "place_p99_ms": round(cuts[98], 2),
        "rss_mib": round(scheduler.memory_info().rss / 2**20),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _scheduler(code: Path, address: str, store: str) -> Iterator[int]:
    """Start a scheduler's process, which ends with the block. Yields its id."""
    command = [sys.executable, "-m", "baton.services.cli.main", "scheduler", "--scheduler", address]
    command += ["--store", store, "--worker-lease-s", "3600", "--max-queued-prompt-tokens", str(10**9)]
    environment = {**os.environ, "PYTHONPATH": f"{code / 'src'}:{code}"}
    with subprocess.Popen(command, env=environment, cwd=code) as process:
        try:
            port = int(address.rpartition(":")[2])
            eventually(lambda: listening(port), START_S, "the scheduler listens")
            yield process.pid
        finally:
            process.terminate()
