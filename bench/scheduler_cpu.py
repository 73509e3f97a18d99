"""The CPU time of schedulers' processes while requests are placed, prefilled and finished at a rate.

A real `baton scheduler`, or several that share the requests, over a real Redis, and two routers' clients
(bench/scheduler_client.py): each is a process of its own. Requests come evenly, whatever happens to earlier
ones. Schedulers and Redis remember a request for a minute after its end: the measurement begins after that,
or in the middle of a shorter run.

Each process's share of a core is measured, what the machine had left, and how late the clients woke up: a
latency that a client made by itself is no latency of the scheduler. A run in which the scheduler lost its
store, even for a moment, fails: memory decided meanwhile, and its figures are of something else.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from baton.attempts import EPOCH_KEEP_S
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.store.resilient import AWAY
from bench.scheduler_client import READY
from harness.stats import percentile
from harness.support import PYTHON, ROOT, eventually, free_port, listening, redis_server

CLIENTS = 2  # processes; one alone is itself late at some hundred placements a second
START_S = 20.0
END_S = 60.0  # for the last requests


async def register(address: str, workers: list[pb.WorkerIdentity]) -> None:
    """Register workers that are ready."""
    async with SchedulerClient(address) as client:
        for identity in workers:
            await client.register(identity, pb.WORKER_STATE_READY)


def measure(
    rate: int, hold_s: float, workers: list[pb.WorkerIdentity], code: Path = ROOT, schedulers: int = 1
) -> dict[str, float]:
    """Measure schedulers of the checkout `code` under this load. SystemExit where one lost its store.

    Of several, the cores and the memory are those of the busiest and the largest.
    """
    redis_port = free_port()
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(schedulers)]
    with tempfile.TemporaryDirectory() as folder, redis_server(redis_port) as redis:
        logs = [Path(folder) / f"scheduler-{number}.log" for number in range(schedulers)]
        with ExitStack() as stack:
            own = [
                stack.enter_context(_scheduler(code, address, f"redis://127.0.0.1:{redis_port}/0", log))
                for address, log in zip(addresses, logs, strict=True)
            ]
            address = ",".join(addresses)
            asyncio.run(register(address, workers))
            figures = _measure(rate, hold_s, address, own, redis.pid, Path(folder))
        losses = [line for log in logs for line in log.read_text().splitlines() if AWAY in line]
        if losses:
            raise SystemExit(f"the store was lost {len(losses)} times: {figures}\n" + "\n".join(losses[:5]))
    return figures


def _measure(
    rate: int, hold_s: float, address: str, schedulers: list[int], redis: int, folder: Path
) -> dict[str, float]:
    processes = [psutil.Process(pid) for pid in (*schedulers, redis)]
    with ExitStack() as stack:
        answers = [folder / f"router-{number}" for number in range(CLIENTS)]
        clients = [stack.enter_context(_client(address, answer, rate / CLIENTS)) for answer in answers]
        eventually(lambda: all(READY in one.read_text() for one in answers), START_S, "they have begun")
        begin = time.monotonic()
        since, until = begin + min(EPOCH_KEEP_S, hold_s / 2), begin + hold_s
        for client in clients:
            print(begin, since, until, file=client.stdin, flush=True)
        time.sleep(since - time.monotonic())
        before, idle = [_cpu_s(one) for one in processes], _idle_s()
        load: list[float] = []
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            load.append(os.getloadavg()[0])
        took_s = time.monotonic() - since
        *own, redis_cores = ((_cpu_s(one) - was) / took_s for one, was in zip(processes, before, strict=True))
        idle = (_idle_s() - idle) / took_s
        rss_mib = max(one.memory_info().rss for one in processes[:-1]) / 2**20
        for client in clients:
            if client.wait(END_S):
                raise SystemExit(f"a client ended with {client.returncode}: no figure means anything")
    told = [json.loads(answer.read_text().partition("\n")[2]) for answer in answers]
    return _figures(rate, until - since, told) | {
        "scheduler_cores": round(max(own), 3),
        "redis_cores": round(redis_cores, 3),
        "clients_cores": round(sum(one["cpu_s"] for one in told) / (until - since), 3),
        "idle_cores": round(idle, 3),
        "load_most": round(max(load), 1),
        "rss_mib": round(rss_mib),
    }


def _figures(rate: int, seconds: float, told: list[dict[str, Any]]) -> dict[str, float]:
    if dropped := sum(one["dropped"] for one in told):
        raise SystemExit(f"{dropped} reports were dropped: no figure means anything")
    took, late = ([1_000 * one for each in told for one in each[key]] for key in ("took", "late"))
    failures: Counter[str] = sum((Counter(one["failures"]) for one in told), Counter())
    if failures:
        print(f"failed: {dict(failures)}", flush=True)
    return {
        "asked_per_s": rate,
        "placed_per_s": round(len(took) / seconds),
        "failed": failures.total(),  # above 0 it could not keep up
        "place_p50_ms": round(percentile(took, 0.5), 2),
        "place_p99_ms": round(percentile(took, 0.99), 2),
        "place_max_ms": round(max(took), 2),
        "client_late_p99_ms": round(percentile(late, 0.99), 2),
        "client_late_max_ms": round(max(late), 2),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _idle_s() -> float:
    """Return the seconds for which the machine's cores had nothing to do, all together."""
    return float(psutil.cpu_times().idle)


@contextmanager
def _scheduler(code: Path, address: str, store: str, log: Path) -> Iterator[int]:
    """Start a scheduler's process, which ends with the block. Yields its id."""
    command = [sys.executable, "-m", "baton.services.cli.main", "scheduler", "--scheduler", address]
    command += ["--store", store, "--worker-lease-s", "3600", "--max-queued-prompt-tokens", str(10**9)]
    environment = {**os.environ, "PYTHONPATH": f"{code / 'src'}:{code}"}
    with log.open("wb") as out, subprocess.Popen(command, env=environment, cwd=code, stderr=out) as process:
        try:
            port = int(address.rpartition(":")[2])
            eventually(lambda: listening(port), START_S, "the scheduler listens")
            yield process.pid
        finally:
            process.terminate()


@contextmanager
def _client(address: str, answer: Path, rate: float) -> Iterator[subprocess.Popen[str]]:
    """Start a client's process, which ends with the block; its figures are in the file `answer` then."""
    command = [str(PYTHON), "-m", "bench.scheduler_client", address, answer.name, str(rate)]
    with (
        answer.open("wb") as out,
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=out, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()
