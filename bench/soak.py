"""Many small requests, and the memory of every process: it must stay flat.

1P1D of the demo model with its drafts. Several kept connections send short requests of all kinds: answers in
one piece and streams, some that are refused and some whose client leaves at once or in the middle. Memory is
the anonymous one of a process and its children, sampled while nothing waits; its slope is the median of the
slopes between the samples after the warm-up, which is longer than the minute for which workers and scheduler
remember the epochs of ended requests.

With `--full-house` there are several times as many connections as the workers admit requests, so that the
others wait in the router; the shares of the kinds stay.

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
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.light import Client
from bench.processes import anonymous_mib, processes, rss_mib
from harness.deployment import ENGINE, MODEL_NAME, Deployment, deployment, free_blocks, idle
from harness.stats import median, save
from harness.support import eventually

CONNECTIONS, SLOTS = 8, 16
FULL_HOUSE = 96, 8  # of both: at most 10 are on the workers (scheduler.max_queue_factor)
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
        result = asyncio.run(soak(one, options.requests, connections))
    save("soak-full-house" if options.full_house else "soak", {"slots": slots, **result})
    for name, row in result["processes"].items():
        print(f"{name:>10}", row, flush=True)
    print({key: value for key, value in result.items() if key != "processes"})
    growing = [name for name, row in result["processes"].items() if row["mib_per_1000"] > BOUND]
    if growing or result["failed"] or result["blocks_missing"]:
        raise SystemExit(f"memory grows: {growing}; failed: {result['failed']}; see above")


async def soak(one: Deployment, requests: int, connections: int) -> dict[str, Any]:
    client, draw = Client(one.port), random.Random(1)
    watched = processes(one)
    await part(client, draw, 50, connections, Counter(), [])  # one-time allocations
    await every_step_size(client)
    eventually(lambda: idle(one), SETTLE_S, "nothing runs")
    blocks, began = free_blocks(one), time.monotonic()
    counts: Counter[str] = Counter()
    failed: list[str] = []
    samples = [sample(watched, 0, 0.0)]
    per_sample = max(1, requests // SAMPLES)
    waiting: list[float] = []
    while (done := counts.total()) < requests:
        looking = asyncio.create_task(look(one, waiting))
        await part(client, draw, min(per_sample, requests - done), connections, counts, failed)
        looking.cancel()
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
        "waiting_p50": round(median(waiting)) if waiting else 0,
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
        while True:
            await asyncio.sleep(LOOK_S)
            lines = (await client.get("/metrics")).text.splitlines()
            waiting += [float(line.split()[-1]) for line in lines if line.startswith(WAITING)]


async def part(
    client: Client,
    draw: random.Random,
    requests: int,
    connections: int,
    counts: Counter[str],
    failed: list[str],
) -> None:
    """Send so many requests over all connections."""
    left = iter(range(requests))

    async def loop() -> None:
        for _ in left:
            kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
            counts[kind] += 1
            if problem := await one_request(client, draw, kind):
                failed.append(f"{kind}: {problem}")

    await asyncio.gather(*(loop() for _ in range(connections)))


async def one_request(client: Client, draw: random.Random, kind: str) -> str:
    """Send one request. Return what went wrong, or ""."""
    asked: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": [draw.randrange(300, 4000) for _ in range(draw.randint(4, 24))],
        "max_tokens": draw.randint(1, 4),
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
