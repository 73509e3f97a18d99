"""Interactive requests beside a flood of batch work: what each class gets, with classes and without.

One deployment of the 80 M model, to which requests come in turns: interactive ones alone, at random times;
batch work alone, more streams than there are slots; both, the batch work as OpenAI's `service_tier: flex`;
and both without saying so. The interactive requests of a round are the same in each arm.

What is left for batch is the part of the time in which the busiest engine has no step while interactive
requests are alone. The load generator shares the cores; it runs at nice 10 (bench/light.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.flood import opened
from bench.light import Client, Reply
from bench.model import MODEL_NAME, engine_settings
from harness.deployment import Deployment, deployment, idle
from harness.stats import median, percentile, save
from harness.support import eventually

ALONE, BATCH, CLASSES, EQUAL = ARMS = "alone", "batch alone", "with classes", "without classes"
GOAL_LATENCY, GOAL_BATCH = 1.2, 0.9
PROMPT, ANSWER = 64, 32  # tokens of an interactive request
BATCH_PROMPT, BATCH_ANSWER = 256, 64
FLEX = {"service_tier": "flex"}
SETTLE_S = 60.0
VOCABULARY = 4_000


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the four arms")
    parser.add_argument("--seconds", type=float, default=20.0, help="of an arm in a round")
    parser.add_argument("--per-s", type=float, default=1.0, help="interactive requests a second and pair")
    parser.add_argument("--streams", type=int, default=24, help="of batch work, for each pair")
    parser.add_argument("--itl-ms", type=float, default=15.0, help="goal of the interactive class")
    parser.add_argument(
        "--pairs", type=int, nargs="+", default=[1, 2], help="prefill and decode workers each"
    )
    options = parser.parse_args(arguments)
    found = {f"{pairs}P{pairs}D": measure(pairs, options) for pairs in options.pairs}
    save("classes", {"load": vars(options), "deployments": found})


def measure(pairs: int, options: argparse.Namespace) -> dict[str, Any]:
    classes = {"interactive": {"itl_s": options.itl_ms / 1e3}}
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder) / "one", engine=engine_settings(), classes=classes) as one,
    ):
        one.up(pairs, pairs)
        niceness = os.nice(0)
        os.nice(max(0, 10 - niceness))  # this process: the deployment's are started
        result = asyncio.run(in_turns(one, pairs, options))
    print(f"{pairs}P{pairs}D", json.dumps(result, indent=2), flush=True)
    return result


async def in_turns(one: Deployment, pairs: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the arms, in another order each round."""
    client, seconds = Client(one.port), options.seconds
    mine: dict[str, list[Reply]] = {arm: [] for arm in ARMS}
    batch: dict[str, list[float]] = {arm: [] for arm in ARMS}
    busy: dict[str, list[float]] = {arm: [] for arm in ARMS}
    order = list(ARMS)
    gc.collect()
    gc.disable()  # our own pauses would look like the server's
    try:
        await flood(client, options.streams, min(8.0, seconds), {})  # warm
        for number in range(options.rounds):
            for arm in order:
                eventually(lambda: idle(one), SETTLE_S, "nothing runs")
                draw, began, before = random.Random(number), time.perf_counter(), busy_s(one)
                asked = []
                if arm != BATCH:
                    make = partial(body, draw, PROMPT, ANSWER)
                    asked.append(opened(client, make, options.per_s * pairs, seconds, draw))
                if arm != ALONE:
                    flex = FLEX if arm != EQUAL else {}
                    asked.append(flood(client, options.streams * pairs, seconds, flex))
                got = await asyncio.gather(*asked)
                took = time.perf_counter() - began
                if arm != BATCH:
                    mine[arm] += got[0]
                if arm != ALONE:
                    came = [at for reply in got[-1] for at in reply.arrivals if at < began + seconds]
                    batch[arm].append(len(came) / seconds)
                busy[arm].append(
                    max(after - was for was, after in zip(before, busy_s(one), strict=True)) / took
                )
            order.append(order.pop(0))
    finally:
        gc.enable()
        await client.close()
    left = 1 - median(busy[ALONE])
    latencies = {arm: figures(replies) for arm, replies in mine.items() if replies}
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


async def flood(client: Client, streams: int, seconds: float, flex: dict[str, str]) -> list[Reply]:
    """Keep so many streams of batch work under way; a reply that is not over at the end is cut off."""
    until, draw, replies = time.perf_counter() + seconds, random.Random(), []

    async def loop() -> None:
        while time.perf_counter() < until:
            replies.append(
                await client.post("/v1/completions", body(draw, BATCH_PROMPT, BATCH_ANSWER) | flex)
            )

    await asyncio.gather(*(loop() for _ in range(streams)))
    return replies


def busy_s(one: Deployment) -> list[float]:
    """Return each engine's seconds in steps, those that prefill first."""
    workers = sorted(one.describe().workers, key=lambda worker: worker.identity.worker_id)
    return [worker.load.counts.busy_s for worker in workers]


def figures(replies: list[Reply]) -> dict[str, float]:
    whole = [reply for reply in replies if reply.arrivals]
    ttft = [1e3 * (reply.arrivals[0] - reply.asked) for reply in whole]
    gaps = [1e3 * gap for reply in whole for gap in reply.gaps]
    found = {
        f"{name}_p{round(100 * share)}_ms": round(percentile(values, share), 2)
        for name, values in (("ttft", ttft), ("itl", gaps))
        for share in (0.5, 0.9, 0.99)
    }
    return {"answers": len(whole), "lost": len(replies) - len(whole), **found}


def body(draw: random.Random, prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": [draw.randrange(100, VOCABULARY) for _ in range(prompt_tokens)],
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
