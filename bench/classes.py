"""Measure interactive requests during a flood of batch work, with service classes and without.

The arms alternate on one deployment of the 80 M model: interactive requests alone, at random times; batch
work alone, with more streams than slots; both, the batch work as OpenAI's `service_tier: flex`; and both
without classes. In each arm of a round the interactive requests arrive at the same times, with different
tokens so that the prefix cache cannot help. In a fifth arm they arrive while a loop keeps the decode workers'
cores busy, which shows how long they wait for the CPU.

Batch work can use the time in which the busiest engine runs no step under interactive requests alone. The
batch generator shares the cores, so it runs at nice 10 and in its own process, where it cannot delay the
interactive generator.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

from bench.light import Client, Reply, body, closed, latencies, opened
from bench.options import options
from bench.served import MODEL_NAME, no_pauses, up
from harness.deployment import Deployment, idle
from harness.stats import median, save
from harness.support import eventually

ALONE, BATCH, CLASSES, EQUAL = "alone", "batch alone", "with classes", "without classes"
BUSY = "beside busy cores"
ARMS = ALONE, BATCH, CLASSES, EQUAL, BUSY
GOAL_LATENCY, GOAL_BATCH = 1.2, 0.9
PROMPT, ANSWER = 64, 32  # tokens of an interactive request
BATCH_PROMPT, BATCH_ANSWER = 256, 64
FLEX = {"service_tier": "flex"}
SETTLE_S = 60.0


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(5, "of all arms"),
        seconds=(20.0, "of an arm in a round"),
        per_s=(1.0, "interactive requests a second and pair"),
        streams=(24, "of batch work, for each pair"),
        ttft_ms=(100.0, "goal of the interactive class"),
        itl_ms=(15.0, "its goal between tokens"),
        pairs=([1, 2], "prefill workers, and as many decode workers"),
    )
    found = {f"{pairs}P{pairs}D": measure(pairs, given) for pairs in given.pairs}
    save("classes", {"load": vars(given), "deployments": found})


def measure(pairs: int, given: argparse.Namespace) -> dict[str, Any]:
    """Measure a deployment with `pairs` prefill and `pairs` decode workers."""
    classes = {"interactive": {"itl_s": given.itl_ms / 1e3, "ttft_s": given.ttft_ms / 1e3}}
    with (
        up(pairs, pairs, classes=classes) as one,
        ProcessPoolExecutor(1, get_context("spawn"), os.nice, (10,)) as flooding,
        no_pauses(),
    ):
        result = asyncio.run(in_turns(one, pairs, given, flooding))
    print(f"{pairs}P{pairs}D", json.dumps(result, indent=2), flush=True)
    return result


async def in_turns(
    one: Deployment, pairs: int, given: argparse.Namespace, flooding: ProcessPoolExecutor
) -> dict[str, Any]:
    """Measure the arms, in a different order each round."""
    client, seconds = Client(one.port), given.seconds
    mine: dict[str, list[Reply]] = {arm: [] for arm in ARMS}
    batch: dict[str, list[float]] = {arm: [] for arm in ARMS}
    busy: dict[str, list[float]] = {arm: [] for arm in ARMS}
    order = list(ARMS)
    make = partial(body, random.Random(), PROMPT, ANSWER, model=MODEL_NAME)
    run = partial(asyncio.get_running_loop().run_in_executor, flooding)
    await run(flood, one.port, given.streams, min(8.0, seconds), {})  # warm
    for number in range(given.rounds):
        for arm in order:
            eventually(lambda: idle(one), SETTLE_S, "nothing runs")
            times, began, before = random.Random(number), time.perf_counter(), busy_s(one)
            asked: list[Awaitable[Any]] = []
            if arm in {BATCH, CLASSES, EQUAL}:
                flex = FLEX if arm != EQUAL else {}
                asked.append(run(flood, one.port, given.streams * pairs, seconds, flex))
            if arm != BATCH:
                asked.append(opened(client, make, given.per_s * pairs, seconds, times))
            with burning(pairs if arm == BUSY else 0):
                *rates, got = await asyncio.gather(*asked)
            took = time.perf_counter() - began
            if arm == BATCH:
                rates = [got]
            else:
                mine[arm] += got
            batch[arm] += rates
            busy[arm].append(max(after - was for was, after in zip(before, busy_s(one), strict=True)) / took)
        order.append(order.pop(0))
    await client.close()
    return summary(mine, batch, 1 - median(busy[ALONE]))


def summary(mine: dict[str, list[Reply]], batch: dict[str, list[float]], left: float) -> dict[str, Any]:
    """Return both classes' figures and the ratios that have goals."""
    latencies = {arm: figures(mine[arm]) for arm in ARMS if mine[arm]}
    rates = {arm: round(median(values), 1) for arm, values in batch.items() if values}
    goals = {
        f"{name} (goal <= {GOAL_LATENCY})": latencies[CLASSES][name] / latencies[ALONE][name]
        for name in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    }
    goals[f"batch of what is left (goal >= {GOAL_BATCH})"] = rates[CLASSES] / (left * rates[BATCH])
    return {
        "interactive": latencies,
        "batch_tokens_per_s": rates,
        "left": round(left, 3),
        "goals": {name: round(value, 3) for name, value in goals.items()},
    }


def flood(port: int, streams: int, seconds: float, flex: dict[str, str]) -> float:
    """Keep `streams` batch streams running and return their tokens/s."""
    gc.disable()
    draw, until = random.Random(), time.perf_counter() + seconds

    async def run() -> list[Reply]:
        client = Client(port)
        make = partial(body, draw, BATCH_PROMPT, BATCH_ANSWER, model=MODEL_NAME)
        replies = await closed(client, lambda: make() | flex, streams, seconds)
        await client.close()
        return replies

    return sum(at < until for reply in asyncio.run(run()) for at in reply.arrivals) / seconds


@contextmanager
def burning(pairs: int) -> Iterator[None]:
    """Keep the decode workers' cores busy; they come after the prefill workers' cores."""
    cores = sorted(os.sched_getaffinity(0))
    burners = [
        subprocess.Popen(
            ["taskset", "-c", str(cores[(pairs + at) % len(cores)]), "sh", "-c", "while :; do :; done"]
        )
        for at in range(pairs)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def busy_s(one: Deployment) -> list[float]:
    """Return the seconds that each engine has spent in steps."""
    workers = sorted(one.describe().workers, key=lambda worker: worker.identity.worker_id)
    return [worker.load.counts.busy_s for worker in workers]


def figures(replies: list[Reply]) -> dict[str, float]:
    """Return latencies and the number of lost requests."""
    found = latencies(replies)
    return {**found, "lost": len(replies) - found["answers"]}
