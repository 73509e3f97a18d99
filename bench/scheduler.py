"""Measure the throughput, latency and CPU cost of real schedulers' placements.

    python -m bench scheduler                               the arms of docs/benchmarks.md
    python -m bench scheduler --against FOLDER --rounds 3   alternate with another checkout
    python -m bench scheduler --stores memory --routers 1 --pairs 32 --schedulers 1

Schedulers and Redis are separate processes. Routers are spread over `CLIENTS` processes, and fake workers
with heartbeats share one (bench/scheduler_client.py). Each arm differs in one thing from the first: 20
routers and 32P32D with one scheduler over Redis. Routers first place requests that live for two seconds at a
fixed rate, then place as fast as they can. A placement includes the reports that its prompt was prefilled and
that it ended. CPU time is the schedulers', minus what they use without placements.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.options import options
from bench.scheduler_client import Part, parts_of
from harness.scheduling import RedisServer
from harness.stats import percentile, save
from harness.support import ROOT, eventually, free_port, listening, running

CLIENTS = 2  # processes of routers
CLIENT = Path(__file__).with_name("scheduler_client.py")
START_S = 20.0
READY_S = 60.0  # timeout for the workers to be ready
IMPORT_S = 4.0  # time that the router processes have to import gRPC
IDLE_S = 3.0  # duration of the idle measurement
END_S = 60.0  # timeout for the end of the last requests
LEASE_S = 60.0  # a fifth is the interval of heartbeats: those of 1,000 workers every second use a core


@dataclass(frozen=True)
class Arm:
    """A deployment and its load."""

    store: str = "redis"  # or memory, or stopped (Redis hangs from the middle of the first part on)
    routers: int = 20
    pairs: int = 32
    schedulers: int = 1

    def __str__(self) -> str:
        counts = f"{_many(self.routers, 'router')}, {_many(self.schedulers, 'scheduler')}"
        return f"{self.store}, {counts}, {self.pairs}P{self.pairs}D"


@dataclass(frozen=True)
class _Used:
    """CPU seconds between two moments."""

    seconds: float
    schedulers: Sequence[float]
    redis: float


def main(arguments: list[str]) -> None:
    kinds = ["memory", "redis", "stopped"]
    given = options(
        __doc__,
        arguments,
        stores=(kinds, "stopped: Redis hangs midway", kinds),
        routers=[1, 2, 100],
        pairs=([500], "prefill workers, and as many decode workers"),
        schedulers=[2],
        rate=(500.0, "placements/s of all routers"),
        seconds=(8.0, "of each of the two parts"),
        rounds=(1, "the one with the lowest p50 counts, because other work can only raise it"),
        against=(Path, "another checkout, measured alternately"),
    )
    codes = {"here": ROOT} | ({"against": given.against.resolve()} if given.against else {})
    found: dict[str, dict[str, dict[str, float]]] = {code: {} for code in codes}
    for arm in arms(given):
        runs: dict[str, list[dict[str, float]]] = {code: [] for code in codes}
        for _ in range(given.rounds):
            for code, folder in codes.items():
                figures = measure(arm, folder, given.rate, given.seconds)
                shown = ", ".join(f"{key} {value:g}" for key, value in figures.items())
                print(f"{arm}, {code}: {shown}", flush=True)
                runs[code].append(figures)
        for code, several in runs.items():
            found[code][str(arm)] = min(several, key=lambda one: one["place_p50_ms"])
    load = {"rate": given.rate, "seconds": given.seconds, "rounds": given.rounds}
    save("scheduler", {**load, "arms": found})


def arms(given: argparse.Namespace) -> list[Arm]:
    some = [replace(Arm(), store=one) for one in given.stores]
    some += [replace(Arm(), routers=one) for one in given.routers]
    some += [replace(Arm(), pairs=one) for one in given.pairs]
    some += [replace(Arm(), schedulers=one) for one in given.schedulers]
    return list(dict.fromkeys(some))


def measure(arm: Arm, code: Path, rate: float, seconds: float) -> dict[str, float]:
    """Measure an arm with the checkout `code`: placements at a rate, then as fast as possible."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(arm.schedulers)]
    address = ",".join(addresses)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, redis, store = Path(name), None, "memory"
        if arm.store != "memory":
            redis = stack.enter_context(RedisServer(folder))
            store = redis.url
        own = [stack.enter_context(_scheduler(code, one, store)) for one in addresses]
        workers = stack.enter_context(_client(code, folder / "workers", "workers", address, arm.pairs))
        _await_ready(workers, folder / "workers")
        begin = time.monotonic() + IMPORT_S + IDLE_S
        dealt = [
            (folder / f"routers-{number}", len(range(number, arm.routers, CLIENTS)))
            for number in range(min(CLIENTS, arm.routers))
        ]
        clients = [
            stack.enter_context(
                _client(
                    *(code, answer, "routers", address, answer.name, many),
                    *(rate * many / arm.routers, begin, seconds),
                )
            )
            for answer, many in dealt
        ]
        used = _watch(own, redis, begin, seconds, stops=arm.store == "stopped")
        for client in clients:
            if client.wait(END_S):
                raise SystemExit(f"routers ended with {client.returncode}: no figures")
        told = [json.loads(answer.read_text()) for answer, _ in dealt]
        idle, *both = used
        held, hasty = (
            _figures([one[number] for one in told], part, idle) for number, part in enumerate(both)
        )
        fast = ("placed_per_s", "failed", "place_p50_ms", "place_p99_ms", "cpu_us", "scheduler_cores")
        return {
            **held,
            **{f"fast_{key}": hasty[key] for key in fast},
            "a_core_s": round(1e6 / hasty["cpu_us"]),
            "idle_cores": round(max(idle.schedulers) / idle.seconds, 3),
            "rss_mib": round(max(one.memory_info().rss for one in map(psutil.Process, own)) / 2**20),
        }


def _watch(
    schedulers: Sequence[int],
    redis: RedisServer | None,
    begin: float,
    seconds: float,
    *,
    stops: bool,
) -> list[_Used]:
    """Return the CPU time before the load and in each of its parts. stops: stop Redis in the first part."""
    held, hasty = parts_of(begin, seconds)
    found = []
    for part in (Part(begin - IDLE_S, begin), held, hasty):
        _sleep_until(part.since)
        before, began = _cpu_s(schedulers, redis), time.monotonic()
        if part is held and redis is not None and stops:
            _sleep_until((part.since + part.until) / 2)
            redis.hang()  # killed when its block ends
        _sleep_until(part.until)
        *own, theirs = (now - was for now, was in zip(_cpu_s(schedulers, redis), before, strict=True))
        found.append(_Used(time.monotonic() - began, own, theirs))
    return found


def _figures(told: Sequence[dict[str, Any]], used: _Used, idle: _Used) -> dict[str, float]:
    took, own, late = ([1_000 * one for each in told for one in each[key]] for key in ("took", "own", "late"))
    failures: Counter[str] = sum((Counter(one["failures"]) for one in told), Counter())
    if failures:
        print(f"failed: {dict(failures)}", flush=True)
    cpu_s = sum(used.schedulers) - used.seconds * sum(idle.schedulers) / idle.seconds
    redis_s = used.redis - used.seconds * idle.redis / idle.seconds
    many = max(1, len(took))
    return {
        "placed_per_s": round(len(took) / used.seconds),
        "failed": failures.total(),
        "place_p50_ms": round(percentile(took, 0.5), 3),
        "place_p99_ms": round(percentile(took, 0.99), 3),
        "place_max_ms": round(max(took, default=0.0), 1),
        "own_p50_ms": round(percentile(own, 0.5), 3),  # the scheduler's share
        "own_p99_ms": round(percentile(own, 0.99), 3),
        "late_p99_ms": round(percentile(late, 0.99), 3) if late else 0.0,  # lag of the routers' processes
        "cpu_us": round(1e6 * cpu_s / many, 1),  # per placement, all schedulers together
        "redis_us": round(1e6 * max(0.0, redis_s) / many, 1),
        "scheduler_cores": round(max(used.schedulers) / used.seconds, 3),
    }


def _cpu_s(schedulers: Sequence[int], redis: RedisServer | None) -> list[float]:
    times = [psutil.Process(pid).cpu_times() for pid in (*schedulers, *([redis.pid] if redis else []))]
    found = [float(one.user + one.system) for one in times]
    return found if redis else [*found, 0.0]


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _await_ready(workers: subprocess.Popen[bytes], output: Path) -> None:
    def ready() -> bool:
        if workers.poll() is not None:
            raise SystemExit(f"the workers ended with {workers.returncode}: no figures")
        return "ready" in output.read_text()

    eventually(ready, READY_S, "all workers are ready")


@contextmanager
def _scheduler(code: Path, address: str, store: str) -> Iterator[int]:
    """Run a scheduler during the block and yield its process id."""
    command = [sys.executable, "-m", "baton.services.cli.main", "scheduler", "--scheduler", address]
    command += ["--store", store, "--max-queued-prompt-tokens", str(10**9)]
    command += ["--worker-lease-s", str(LEASE_S)]
    port = int(address.rpartition(":")[2])
    environment = _environment(code)
    with running(command, lambda: listening(port), START_S, env=environment, cwd=code) as process:
        yield process.pid


@contextmanager
def _client(code: Path, output: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of clients during the block, with its output in `output`."""
    command = [sys.executable, "-P", str(CLIENT), *map(str, arguments)]
    with (
        output.open("wb") as out,
        subprocess.Popen(command, env=_environment(code), cwd=code, stdout=out) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _environment(code: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{code / 'src'}:{code}", "PYTHONDONTWRITEBYTECODE": "1"}


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
