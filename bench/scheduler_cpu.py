"""The CPU time of a scheduler's process while requests are placed, prefilled and finished at a rate.

A real `baton scheduler` over a real Redis, and two routers' clients (bench/scheduler_client.py): each is a
process of its own. Requests come evenly, whatever happens to earlier ones. The scheduler and its Redis
remember a request for a minute after its end: the measurement begins after that, or in the middle of a
shorter run.

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

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.keys import EPOCH_KEEP_MS
from baton.scheduler.store.resilient import AWAY
from harness.stats import percentile
from harness.support import PYTHON, ROOT, eventually, free_port, listening, redis_server

CLIENTS = 2  # processes; one alone is itself late at some hundred placements a second
START_S = 20.0
IMPORT_S = 4.0  # until clients have imported gRPC
END_S = 60.0  # for the last requests


async def register(address: str, workers: list[pb.WorkerIdentity]) -> None:
    """Register workers that are ready."""
    async with SchedulerClient(address) as client:
        for identity in workers:
            await client.register(identity, pb.WORKER_STATE_READY)


def measure(
    rate: int, hold_s: float, workers: list[pb.WorkerIdentity], code: Path = ROOT
) -> dict[str, float]:
    """Measure the scheduler of the checkout `code` under this load. SystemExit where it lost its store."""
    redis_port, port = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, redis_server(redis_port) as redis:
        log = Path(folder) / "scheduler.log"
        with _scheduler(code, address, f"redis://127.0.0.1:{redis_port}/0", log) as own:
            asyncio.run(register(address, workers))
            pids = {"scheduler": own, "redis": redis.pid}
            figures = _measure(rate, hold_s, address, pids, Path(folder))
        losses = [line for line in log.read_text().splitlines() if AWAY in line]
        if losses:
            raise SystemExit(f"the store was lost {len(losses)} times: {figures}\n" + "\n".join(losses[:5]))
    return figures


def _measure(rate: int, hold_s: float, address: str, pids: dict[str, int], folder: Path) -> dict[str, float]:
    begin = time.monotonic() + IMPORT_S
    since, until = begin + min(EPOCH_KEEP_MS / 1_000, hold_s / 2), begin + hold_s
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    with ExitStack() as stack:
        answers = [folder / f"router-{number}" for number in range(CLIENTS)]
        clients = [
            stack.enter_context(_client(address, answer, rate / CLIENTS, begin, since, until))
            for answer in answers
        ]
        time.sleep(since - time.monotonic())
        before, idle = {name: _cpu_s(one) for name, one in processes.items()}, _idle_s()
        load: list[float] = []
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            load.append(os.getloadavg()[0])
        took_s = time.monotonic() - since
        cores = {f"{name}_cores": (_cpu_s(one) - before[name]) / took_s for name, one in processes.items()}
        idle = (_idle_s() - idle) / took_s
        rss_mib = processes["scheduler"].memory_info().rss / 2**20
        for client in clients:
            if client.wait(END_S):
                raise SystemExit(f"a client ended with {client.returncode}: no figure means anything")
    told = [json.loads(answer.read_text()) for answer in answers]
    return _figures(rate, until - since, told) | {
        **{name: round(share, 3) for name, share in cores.items()},
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
def _client(address: str, answer: Path, *numbers: float) -> Iterator[subprocess.Popen[bytes]]:
    """Start a client's process, which ends with the block; its figures are in the file `answer` then."""
    command = [str(PYTHON), "-m", "bench.scheduler_client", address, answer.name, *map(str, numbers)]
    with answer.open("wb") as out, subprocess.Popen(command, cwd=ROOT, stdout=out) as process:
        try:
            yield process
        finally:
            process.kill()
