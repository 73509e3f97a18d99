"""Five times as many requests as a deployment can serve: latencies of admitted and of refused ones.

1P1D of the demo model on two cores, without speculation (so that an event is a token). Capacity is what four
closed-loop streams get, as many as the decode worker has slots (max_num_seqs 4). Then requests come at random
times, whether answered or not, at five times that rate: they wait in the router for ten seconds at most, and
one that would wait longer is refused. Before and after, one stream alone and a full house.

The load generator shares the cores; it runs at nice 10 and uses a light HTTP client (bench/light.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.light import Client, Reply
from bench.processes import processes, rss_mib
from harness.deployment import ENGINE, MODEL, MODEL_NAME, Deployment, deployment, free_blocks, idle
from harness.stats import percentile, save
from harness.support import eventually

SLOTS = 4
PROMPT_TOKENS = 32
ANSWER_TOKENS = 64
TIMES = 5.0
WAIT_S = 10.0
GOAL = 1.5  # ITL p99 under overload against unloaded
SETTLE_S = 30.0


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload")
    parser.add_argument("--calm", type=float, default=15.0, help="seconds of each measurement without it")
    parser.add_argument("--times", type=float, default=TIMES, help="capacity")
    options = parser.parse_args(arguments)
    engine = {**ENGINE, "model": str(MODEL), "speculative_config": None, "max_num_seqs": SLOTS}
    scheduler = {"heartbeat_s": 0.5}
    router = {"max_wait_s": WAIT_S}
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder) / "one", engine=engine, scheduler=scheduler, router=router) as one,
    ):
        one.up(1, 1)
        os.nice(10)  # this process: the deployment's are started
        result = asyncio.run(measure(one, options.seconds, options.calm, options.times))
    save("overload", result)
    for name in ("alone", "full", "overload", "after"):
        print(f"{name:>9}", result[name], flush=True)
    print(result["goals"])


async def measure(one: Deployment, seconds: float, calm_s: float, times: float) -> dict[str, Any]:
    client, draw = Client(one.port), random.Random(1)
    gc.collect()
    gc.disable()  # our own pauses would look like the server's
    try:
        await closed(client, draw, SLOTS, min(5.0, calm_s))  # warm
        eventually(lambda: idle(one), SETTLE_S, "nothing runs")
        blocks, memory = free_blocks(one), memories(one)
        alone = figures(await closed(client, draw, 1, calm_s))
        full = figures(replies := await closed(client, draw, SLOTS, calm_s))
        capacity = len(replies) / calm_s
        under = await opened(client, draw, times * capacity, seconds)
        eventually(lambda: idle(one), SETTLE_S, "nothing runs")
        left = {name: after - blocks[name] for name, after in free_blocks(one).items()}
        after_memory = memories(one)
        after = {
            "alone": figures(await closed(client, draw, 1, calm_s)),
            "full": figures(await closed(client, draw, SLOTS, calm_s)),
            "blocks_missing": -sum(left.values()),
            "rss_grew_mib": {name: round(mib - memory[name], 1) for name, mib in after_memory.items()},
        }
    finally:
        gc.enable()
        await client.close()
    admitted = [reply for reply in under if reply.status == 200]
    refused = [reply for reply in under if reply.status == 503]
    overload = {
        **figures(admitted),
        "offered_per_s": round(times * capacity, 1),
        "admitted_share": round(len(admitted) / len(under), 3),
        "admitted_per_s": round(len(admitted) / seconds, 1),
        "refused": len(refused),
        "refused_p50_ms": ms(percentile([reply.took for reply in refused], 0.5)),
        "refused_p99_ms": ms(percentile([reply.took for reply in refused], 0.99)),
        "without_retry_after": sum(b"retry-after" not in reply.headers for reply in refused),
        "other": dict(Counter(str(reply.status) for reply in under if reply.status not in (200, 503))),
        "broken": sum(not reply.whole for reply in admitted),
    }
    return {
        "load": {
            "slots": SLOTS,
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": ANSWER_TOKENS,
            "wait_s": WAIT_S,
            "times": times,
            "seconds": seconds,
            "capacity_per_s": round(capacity, 2),
        },
        "alone": alone,
        "full": full,
        "overload": overload,
        "after": after,
        "goals": {
            "itl_p99_against_alone": round(overload["itl_p99_ms"] / alone["itl_p99_ms"], 2),
            "itl_p99_against_full": round(overload["itl_p99_ms"] / full["itl_p99_ms"], 2),
            "goal": GOAL,
        },
    }


async def closed(client: Client, draw: random.Random, streams: int, seconds: float) -> list[Reply]:
    """Run streams that send the next request as soon as they are answered."""
    until = time.perf_counter() + seconds
    replies: list[Reply] = []

    async def loop() -> None:
        while time.perf_counter() < until:
            replies.append(await client.post("/v1/completions", body(draw)))

    await asyncio.gather(*(loop() for _ in range(streams)))
    return replies


async def opened(client: Client, draw: random.Random, per_s: float, seconds: float) -> list[Reply]:
    """Send requests at random times, at a rate that nothing slows down."""
    replies: list[Reply] = []

    async def ask() -> None:
        try:
            replies.append(await client.post("/v1/completions", body(draw)))
        except OSError:  # TimeoutError is one
            replies.append(Reply(time.perf_counter()))

    tasks: set[asyncio.Task[None]] = set()
    at, end = time.perf_counter(), time.perf_counter() + seconds
    while (at := at + draw.expovariate(per_s)) < end:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.add(task := asyncio.create_task(ask()))
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return replies


def body(draw: random.Random) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": [draw.randrange(300, 4000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def figures(replies: list[Reply]) -> dict[str, Any]:
    """Return milliseconds; the gap to the second token holds the handoff, and counts as any other."""
    gaps = [gap for reply in replies for gap in reply.gaps]
    return {
        "answers": len(replies),
        "itl_p50_ms": ms(percentile(gaps, 0.5)),
        "itl_p99_ms": ms(percentile(gaps, 0.99)),
        "itl_max_ms": ms(max(gaps, default=0.0)),
        "ttft_p50_ms": ms(percentile([one.arrivals[0] - one.asked for one in replies if one.arrivals], 0.5)),
    }


def memories(one: Deployment) -> dict[str, float]:
    return {name: rss_mib(process) for name, process in processes(one).items()}


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
