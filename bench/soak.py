"""Many small requests, and the memory of every process: it must stay flat.

1P1D of the demo model with its drafts. Several kept connections send short requests of all kinds: answers in
one piece and streams, some that are refused and some whose client leaves at once or in the middle. Memory is
the anonymous one of a process and its children, sampled while nothing waits; its slope is the median of the
slopes between the samples after the warm-up, which is longer than the minute for which workers and scheduler
remember the epochs of ended requests.

With `--full-house` there are many times as many connections as the workers admit requests, and answers are
longer, so that the engines and not this process are what limits: the other requests wait in the router. How
many wait is looked at while there are requests left to be sent, not while the last ones of a sample end.
The shares of the kinds stay.

The load generator shares the cores; it runs at nice 10 and uses a light HTTP client (bench/light.py).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.light import Client
from bench.processes import anonymous_mib, processes, rss_mib
from harness.deployment import ENGINE, MODEL_NAME, Deployment, deployment, free_blocks, idle
from harness.stats import median, percentile, save
from harness.support import eventually

CONNECTIONS, SLOTS = 8, 16
FULL_HOUSE = 192, 8  # of both: at most 10 are on the workers (scheduler.max_queue_factor)
ANSWER, FULL_HOUSE_ANSWER = (1, 4), (8, 16)  # tokens
EMPTY = 0.01  # of the samples of a full house: more without anybody waiting, and it was none
LOADED_S = 2.0  # until the connections' first requests have come, in each sample
WAITING = "baton_router_waiting_requests"
LOOK_S = 1.0  # between samples of the router's queue
SAMPLES = 40
WARM_UP_S = 75.0
LARGEST_STEP = 256  # tokens
# MiB a thousand requests of one process: 20,000 requests more would show 10 MiB.
BOUND = 0.5
SETTLE_S = 30.0
# Memory of the KV cache and of the saved KV is allocated at first use, and each prompt uses the next part:
# small ones have been used completely when the warm-up ends.
ENGINE_SETTINGS = {**ENGINE, "kv_cache_gib": 0.05}
STAGING_MIB = 16
KINDS = {"answer": 45, "stream": 35, "leaves at once": 5, "leaves in the middle": 5, "refused": 10}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--full-house", action="store_true", help="most requests wait in the router")
    options = parser.parse_args(arguments)
    connections, slots = FULL_HOUSE if options.full_house else (CONNECTIONS, SLOTS)
    engine = {**ENGINE_SETTINGS, "max_num_seqs": slots}
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder) / "one", engine=engine, scheduler={"heartbeat_s": 0.5}) as one,
    ):
        one.up(1, 1)
        os.nice(10)  # this process: the deployment's are started
        answer = FULL_HOUSE_ANSWER if options.full_house else ANSWER
        result = asyncio.run(soak(one, options.requests, connections, answer))
    save("soak-full-house" if options.full_house else "soak", {"slots": slots, **result})
    for name, row in result["processes"].items():
        print(f"{name:>10}", row, flush=True)
    print({key: value for key, value in result.items() if key != "processes"})
    growing = [name for name, row in result["processes"].items() if row["mib_per_1000"] > BOUND]
    empty = result["waiting_none"] > EMPTY and options.full_house
    if growing or result["failed"] or result["blocks_missing"] or empty:
        house = "; the house was not full" if empty else ""
        raise SystemExit(f"memory grows: {growing}; failed: {result['failed']}{house}; see above")


async def soak(one: Deployment, requests: int, connections: int, answer: tuple[int, int]) -> dict[str, Any]:
    client, draw = Client(one.port), random.Random(1)
    watched = processes(one)
    counts: Counter[str] = Counter()
    failed: list[str] = []
    waiting: list[float] = []
    load = Load(client, draw, connections, answer)
    await load.send(50, Counter(), [], lambda: None)  # one-time allocations
    await every_step_size(client)
    eventually(lambda: idle(one), SETTLE_S, "nothing runs")
    blocks, began = free_blocks(one), time.monotonic()
    samples = [sample(watched, 0, 0.0)]
    per_sample = max(1, requests // SAMPLES)
    while (done := counts.total()) < requests:
        looking = asyncio.create_task(look(one, waiting))
        await load.send(min(per_sample, requests - done), counts, failed, looking.cancel)
        eventually(lambda: idle(one), SETTLE_S, "nothing runs")
        samples.append(sample(watched, counts.total(), time.monotonic() - began))
        if len(samples) % 10 == 0:
            print(f"{counts.total()} requests, {samples[-1]['seconds']:.0f} s", flush=True)
    took = time.monotonic() - began
    missing = sum(blocks.values()) - sum(free_blocks(one).values())
    await client.close()
    return {
        "requests": requests,
        "seconds": round(took),
        "connections": connections,
        "answer_tokens": answer,
        "waiting_samples": len(waiting),
        "waiting_p50": round(median(waiting)) if waiting else 0,
        "waiting_p10": round(percentile(waiting, 0.1)) if waiting else 0,
        "waiting_none": round(waiting.count(0) / len(waiting), 4) if waiting else 1.0,  # share of the samples
        "kinds": dict(counts),
        "failed": len(failed),
        "failures": failed[:5],
        "blocks_missing": missing,
        "bound_mib_per_1000": BOUND,
        "processes": {name: growth(name, samples) for name in watched},
    }


async def every_step_size(client: Client) -> None:
    """Meet every step size: vLLM keeps oneDNN's kernels of each layer for the last 128 sizes.

    Rare sizes come late: without this the cache grows for longer than any soak lasts.
    """
    for tokens in range(2, LARGEST_STEP + 1):
        prompt = [300 + (tokens * 7 + at) % 3000 for at in range(tokens)]
        asked = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        reply = await client.post("/v1/completions", asked)
        if reply.status != 200:
            raise RuntimeError(f"a step of {tokens} tokens was not met: HTTP {reply.status}")


async def look(one: Deployment, waiting: list[float]) -> None:
    """Record again and again how many requests wait in the router: run as a task."""
    async with httpx.AsyncClient(base_url=one.url, timeout=LOOK_S * 10) as client:
        await asyncio.sleep(LOADED_S)
        while True:
            await asyncio.sleep(LOOK_S)
            lines = (await client.get("/metrics")).text.splitlines()
            waiting += [float(line.split()[-1]) for line in lines if line.startswith(WAITING)]


@dataclass(frozen=True)
class Load:
    """Connections that each have one request at a time."""

    client: Client
    draw: random.Random
    connections: int
    answer: tuple[int, int]  # tokens, least and most

    async def send(
        self, requests: int, counts: Counter[str], failed: list[str], on_last: Callable[[], object]
    ) -> None:
        """Send so many requests over all connections. `on_last` is called when none is left to be sent."""
        left = iter(range(requests))

        async def loop() -> None:
            for _ in left:
                kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
                counts[kind] += 1
                if problem := await one_request(self.client, self.draw, kind, self.answer):
                    failed.append(f"{kind}: {problem}")
            on_last()

        await asyncio.gather(*(loop() for _ in range(self.connections)))


async def one_request(client: Client, draw: random.Random, kind: str, answer: tuple[int, int]) -> str:
    """Send one request. Return what went wrong, or ""."""
    asked: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": [draw.randrange(300, 4000) for _ in range(draw.randint(4, 24))],
        "max_tokens": draw.randint(*answer),
        "temperature": 0,
        "return_token_ids": True,
    }
    if kind == "refused":
        asked |= draw.choice([{"n": 100_000}, {"prompt": []}, {"model": "nobody"}, {"temperature": -1}])
        reply = await client.post("/v1/completions", asked)
        return "" if reply.status in (400, 404) else f"{reply.status} {reply.body[:200]!r}"
    if kind == "answer":
        reply = await client.post("/v1/completions", asked)
        return "" if reply.status == 200 and reply.whole else f"{reply.status} {reply.body[:200]!r}"
    asked["stream"] = True
    if kind == "stream":
        reply = await client.post("/v1/completions", asked)
        return "" if reply.status == 200 and reply.whole else f"{reply.status} {reply.body[:200]!r}"
    asked |= {"max_tokens": 200, "ignore_eos": True}
    await client.post("/v1/completions", asked, leave_after=0 if kind == "leaves at once" else 2)
    return ""


def sample(watched: dict[str, psutil.Process], requests: int, seconds: float) -> dict[str, float]:
    found = {name: anonymous_mib(process) for name, process in watched.items()}
    rss = {f"{name} rss": rss_mib(one) for name, one in watched.items()}
    return {"requests": requests, "seconds": seconds, **found, **rss}


def growth(name: str, samples: list[dict[str, float]]) -> dict[str, float]:
    """Return the growth of a process in MiB. With too few samples after the warm-up there is no slope."""
    behind = [one for one in samples if one["seconds"] >= WARM_UP_S] or samples[-1:]
    return {
        "first": round(samples[0][name], 1),
        "warm": round(behind[0][name], 1),
        "last": round(behind[-1][name], 1),
        "rss_last": round(behind[-1][f"{name} rss"], 1),
        "requests_measured": round(behind[-1]["requests"] - behind[0]["requests"]),
        "mib_per_1000": round(1000 * slope([(one["requests"], one[name]) for one in behind]), 3),
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Return the median of the slopes between any two points (Theil, 1950; Sen, 1968).

    An allocator takes and gives back some MiB at a time: a sample that is off by that moves least squares.
    """
    slopes = [(after[1] - one[1]) / (after[0] - one[0]) for one, after in combinations(points, 2)]
    return median(slopes) if slopes else 0.0
