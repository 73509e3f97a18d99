"""The time to first token by stage, against what the client measured: 1P1D idle, busy, and under kills.

    python -m bench attribution [--seconds 40]

Each request is a stream of its own trace; the router's log has its stages under that trace's id. Its share is
the sum of its stages, over the time that its client measured: from the call until the first event of the
stream. `p50` are the requests between the 45th and the 55th percentile of that time, `p99` the slowest
hundredth (at least three). Idle: one request at a time. Busy: streams beside long prompts. Kills: the same,
while a worker is killed now and then, in turns the decode worker and the prefill worker; `baton up` starts it
again.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import itertools
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.services.router.timeline import TO_FIRST_TOKEN
from baton.services.trace_context import begin
from bench.model import MODEL_NAME, engine_settings
from harness.deployment import Deployment, deployment
from harness.stats import percentile, save
from harness.support import CALL_S, eventually

GOAL = 0.95
PARTS = ("engine", "wire", "router", "client")
SHORT, LONG = 64, 700  # tokens of a prompt
ANSWER = 48  # tokens
STREAMS = 4
LONG_EVERY_S = 2.0
KILL_EVERY_S = 15.0
BACK_S = 120.0
VOCABULARY = 4_000
_LINE = re.compile(r" baton.requests: request .* trace_id=([0-9a-f]{32}) .* stages_ms=(\{.*\})")


@dataclass
class Seen:
    """One request as its client saw it."""

    trace_id: str
    ttft_ms: float
    gaps_ms: list[float]


class Load:
    """Streams to one router, and what came of them."""

    def __init__(self, one: Deployment, http: aiohttp.ClientSession) -> None:
        self._one = one
        self._http = http
        self._draw = random.Random(1)
        self.seen: list[Seen] = []
        self.failed = 0

    async def ask(self, tokens: int) -> None:
        """Read one stream to its end."""
        body = {
            "model": MODEL_NAME,
            "prompt": [self._draw.randrange(100, VOCABULARY) for _ in range(tokens)],
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        trace = begin(ratio=1.0)
        headers = {"traceparent": trace.traceparent}
        arrivals: list[float] = []
        asked = time.perf_counter()
        async with self._http.post(f"{self._one.url}/v1/completions", json=body, headers=headers) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    arrivals.append(time.perf_counter())
        if response.status != 200 or not arrivals:
            self.failed += 1
            return
        gaps = [1e3 * (after - before) for before, after in itertools.pairwise(arrivals)]
        self.seen.append(Seen(trace.trace_id, 1e3 * (arrivals[0] - asked), gaps))


async def idle(load: Load, until: float) -> None:
    while time.monotonic() < until:
        await load.ask(SHORT)


async def busy(load: Load, until: float) -> None:
    async def streams() -> None:
        while time.monotonic() < until:
            await load.ask(SHORT)

    async def prompts() -> None:
        asked = []
        while time.monotonic() < until:
            asked.append(asyncio.create_task(load.ask(LONG)))
            await asyncio.sleep(LONG_EVERY_S)
        await asyncio.gather(*asked)

    await asyncio.gather(*(streams() for _ in range(STREAMS)), prompts())


async def kills(one: Deployment, load: Load, until: float) -> int:
    """Return how many workers were killed."""
    killed = 0
    running = asyncio.create_task(busy(load, until))
    while time.monotonic() + KILL_EVERY_S < until:
        await asyncio.sleep(KILL_EVERY_S)
        role = ("decode", "prefill")[killed % 2]
        victim = await asyncio.to_thread(one.worker, role)
        one.worker_process(victim["identity"]["worker_id"]).kill()
        killed += 1
        await asyncio.to_thread(eventually, lambda: whole(one), BACK_S, "the worker is back")
    await running
    return killed


def whole(one: Deployment) -> bool:
    return bool(one.workers("prefill") and one.workers("decode")) and one.healthy()


async def measure(one: Deployment, drive: Callable[[Load], Awaitable[int | None]]) -> dict[str, Any]:
    """Return the figures of one kind of load."""
    before = parts(one)
    timeout = aiohttp.ClientTimeout(total=BACK_S + 60)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        load = Load(one, http)
        gc.collect()
        gc.disable()  # our own pauses would look like the router's
        try:
            killed = await drive(load)
        finally:
            gc.enable()
    told = eventually(lambda: logged(one, load.seen), CALL_S, "the log has every request")
    after = parts(one)
    gaps = [gap for one_seen in load.seen for gap in one_seen.gaps_ms]
    return {
        "requests": len(load.seen),
        "failed": load.failed,
        "killed": killed or 0,
        **figures(load.seen, told),
        "itl": {
            "p50_ms": round(percentile(gaps, 0.5), 2),
            "p99_ms": round(percentile(gaps, 0.99), 2),
            "mean_ms": round(sum(gaps) / max(1, len(gaps)), 2),
            "samples": round(after["engine"][1] - before["engine"][1]),
            "parts_mean_ms": {
                part: round(
                    1e3 * (after[part][0] - before[part][0]) / max(1, after[part][1] - before[part][1]), 3
                )
                for part in PARTS
            },
        },
    }


def figures(seen: list[Seen], told: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the time to first token and its stages, around the median and at its end."""
    ordered = sorted(seen, key=lambda one: one.ttft_ms)
    count = len(ordered)
    groups = {
        "p50": ordered[int(0.45 * count) : int(0.55 * count) + 1],
        "p99": ordered[max(0, min(count - 3, int(0.99 * count))) :],
    }
    shares = [sum(told[one.trace_id].values()) / one.ttft_ms for one in seen]
    return {
        "least_share": round(min(shares), 4),
        **{
            name: {
                "ttft_ms": round(percentile([one.ttft_ms for one in seen], float(name[1:]) / 100), 2),
                "share": round(
                    sum(sum(told[one.trace_id].values()) for one in group)
                    / sum(one.ttft_ms for one in group),
                    4,
                ),
                "stages_ms": {
                    stage: round(sum(told[one.trace_id].get(stage, 0.0) for one in group) / len(group), 3)
                    for stage in TO_FIRST_TOKEN
                    if any(stage in told[one.trace_id] for one in group)
                },
            }
            for name, group in groups.items()
        },
    }


def logged(one: Deployment, seen: list[Seen]) -> dict[str, dict[str, float]] | None:
    """Return the stages of each request by its trace's id, milliseconds; None while one is missing."""
    found = {}
    for log in (one.folder / "logs").glob("router*.log"):
        for line in log.read_text().splitlines():
            if told := _LINE.search(line):
                found[told[1]] = ast.literal_eval(told[2])
    return found if all(one_seen.trace_id in found for one_seen in seen) else None


def parts(one: Deployment) -> dict[str, tuple[float, float]]:
    """Return the sum and the count of each part of a token's way."""
    found: dict[str, dict[str, float]] = {part: {} for part in PARTS}
    for family in text_string_to_metric_families(httpx.get(f"{one.url}/metrics", timeout=CALL_S).text):
        if family.name == "baton_router_itl_stage_seconds":
            for sample in family.samples:
                found[sample.labels["stage"]][sample.name.rpartition("_")[2]] = sample.value
    return {part: (values["sum"], values["count"]) for part, values in found.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of each load; kills take three times it")
    seconds = parser.parse_args(arguments).seconds
    result: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder), engine=engine_settings(), router={"log_level": "info"}) as one,
    ):
        one.up()
        os.nice(10)  # this process: the deployment's are started
        loads: dict[str, Callable[[Load], Awaitable[int | None]]] = {
            "idle": lambda load: idle(load, time.monotonic() + seconds),
            "busy": lambda load: busy(load, time.monotonic() + seconds),
            "kills": lambda load: kills(one, load, time.monotonic() + 3 * seconds),
        }
        asyncio.run(measure(one, lambda load: idle(load, time.monotonic() + 5)))  # warm
        for name, drive in loads.items():
            result[name] = asyncio.run(measure(one, drive))
            print(name, json.dumps(result[name]), flush=True)
    save("attribution", {"goal": GOAL, "seconds": seconds, "loads": result})
