"""Interactive requests beside a flood of batch work: what each class gets, with classes and without.

One deployment of the 80 M model, to which requests come in turns: interactive ones alone, at random times;
batch work alone, more streams than there are slots; both, the batch work as OpenAI's `service_tier: flex`;
and both without saying so. The interactive requests of a round come at the same times in each arm, with other
tokens: a prefix cache would know them. In one more arm they come while something else computes on the decode
workers' cores: what they wait there is the machine's.

What is left for batch is the part of the time in which the busiest engine has no step while interactive
requests are alone. The batch work's generator shares the cores, so it runs at nice 10 (bench/light.py); the
interactive requests' costs next to nothing, and is a process of its own: a busy generator would be measured.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import json
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from baton.services.router.timeline import TO_FIRST_TOKEN
from bench.flood import opened
from bench.light import Client, Reply
from bench.model import MODEL_NAME, engine_settings
from harness.deployment import Deployment, deployment, idle
from harness.stats import median, percentile, save
from harness.support import CALL_S, eventually

ALONE, BATCH, CLASSES, EQUAL = "alone", "batch alone", "with classes", "without classes"
BUSY = "beside busy cores"
ARMS = ALONE, BATCH, CLASSES, EQUAL, BUSY
GOAL_LATENCY, GOAL_BATCH = 1.2, 0.9
PROMPT, ANSWER = 64, 32  # tokens of an interactive request
BATCH_PROMPT, BATCH_ANSWER = 256, 64
FLEX = {"service_tier": "flex"}
SETTLE_S = 60.0
VOCABULARY = 4_000
_STAGES = re.compile(rf" baton.requests: request .* prompt_tokens={PROMPT} .* stages_ms=(\{{.*\}})")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of all arms")
    parser.add_argument("--seconds", type=float, default=20.0, help="of an arm in a round")
    parser.add_argument("--per-s", type=float, default=1.0, help="interactive requests a second and pair")
    parser.add_argument("--streams", type=int, default=24, help="of batch work, for each pair")
    parser.add_argument("--ttft-ms", type=float, default=100.0, help="goal of the interactive class")
    parser.add_argument("--itl-ms", type=float, default=15.0, help="the same, between tokens")
    parser.add_argument(
        "--pairs", type=int, nargs="+", default=[1, 2], help="prefill and decode workers each"
    )
    options = parser.parse_args(arguments)
    found = {f"{pairs}P{pairs}D": measure(pairs, options) for pairs in options.pairs}
    save("classes", {"load": vars(options), "deployments": found})


def measure(pairs: int, options: argparse.Namespace) -> dict[str, Any]:
    classes = {"interactive": {"itl_s": options.itl_ms / 1e3, "ttft_s": options.ttft_ms / 1e3}}
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(
            Path(folder) / "one", engine=engine_settings(), classes=classes, router={"log_level": "info"}
        ) as one,
    ):
        one.up(pairs, pairs)
        with ProcessPoolExecutor(1, get_context("spawn"), os.nice, (10,)) as flooding:
            result = asyncio.run(in_turns(one, pairs, options, flooding))
    print(f"{pairs}P{pairs}D", json.dumps(result, indent=2), flush=True)
    return result


async def in_turns(
    one: Deployment, pairs: int, options: argparse.Namespace, flooding: ProcessPoolExecutor
) -> dict[str, Any]:
    """Measure the arms, in another order each round."""
    client, seconds = Client(one.port), options.seconds
    mine: dict[str, list[Reply]] = {arm: [] for arm in ARMS}
    batch: dict[str, list[float]] = {arm: [] for arm in ARMS}
    busy: dict[str, list[float]] = {arm: [] for arm in ARMS}
    stages: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    order, tokens = list(ARMS), random.Random()
    gc.collect()
    gc.disable()  # our own pauses would look like the server's
    run = partial(asyncio.get_running_loop().run_in_executor, flooding)
    try:
        await run(flood, one.port, options.streams, min(8.0, seconds), {})  # warm
        for number in range(options.rounds):
            for arm in order:
                eventually(lambda: idle(one), SETTLE_S, "nothing runs")
                log, times = Log(one), random.Random(number)
                began, before = time.perf_counter(), busy_s(one)
                asked: list[Awaitable[Any]] = []
                if arm in {BATCH, CLASSES, EQUAL}:
                    flex = FLEX if arm != EQUAL else {}
                    asked.append(run(flood, one.port, options.streams * pairs, seconds, flex))
                if arm != BATCH:
                    make = partial(body, tokens, PROMPT, ANSWER)
                    asked.append(opened(client, make, options.per_s * pairs, seconds, times))
                with burning(pairs if arm == BUSY else 0):
                    *rates, got = await asyncio.gather(*asked)
                took = time.perf_counter() - began
                if arm == BATCH:
                    rates = [got]
                else:
                    mine[arm] += got
                    stages[arm] += eventually(partial(log.stages, len(got)), CALL_S, "the log has them")
                batch[arm] += rates
                busy[arm].append(
                    max(after - was for was, after in zip(before, busy_s(one), strict=True)) / took
                )
            order.append(order.pop(0))
    finally:
        gc.enable()
        await client.close()
    return summary(mine, stages, batch, 1 - median(busy[ALONE]))


def summary(
    mine: dict[str, list[Reply]],
    stages: dict[str, list[dict[str, float]]],
    batch: dict[str, list[float]],
    left: float,
) -> dict[str, Any]:
    latencies = {
        arm: figures(mine[arm]) | {"stages_p50_ms": middle(stages[arm])} for arm in ARMS if mine[arm]
    }
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
    """Keep so many streams of batch work under way for a time, and return their tokens a second."""
    until = time.perf_counter() + seconds
    replies = asyncio.run(_flood(port, streams, until, flex))
    return sum(at < until for reply in replies for at in reply.arrivals) / seconds


async def _flood(port: int, streams: int, until: float, flex: dict[str, str]) -> list[Reply]:
    client, draw, replies = Client(port), random.Random(), []

    async def loop() -> None:
        while time.perf_counter() < until:
            replies.append(
                await client.post("/v1/completions", body(draw, BATCH_PROMPT, BATCH_ANSWER) | flex)
            )

    gc.disable()
    await asyncio.gather(*(loop() for _ in range(streams)))
    await client.close()
    return replies


@contextmanager
def burning(pairs: int) -> Iterator[None]:
    """Keep the cores of so many decode workers busy: those that come behind the prefill workers'."""
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


class Log:
    """The stages of interactive requests' times to first token, as the router's log has them from now on."""

    def __init__(self, one: Deployment) -> None:
        self._files = {file: file.stat().st_size for file in (one.folder / "logs").glob("router*.log")}

    def stages(self, count: int) -> list[dict[str, float]] | None:
        """Return them by request, milliseconds; None while there are fewer than `count`."""
        found = []
        for file, begin in self._files.items():
            text = file.read_bytes()[begin:].decode()
            found += [ast.literal_eval(told[1]) for told in _STAGES.finditer(text)]
        return found if len(found) >= count else None


def middle(stages: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each stage over the middle fifth of the requests."""
    ordered = sorted(stages, key=lambda one: sum(one.values()))
    some = ordered[int(0.4 * len(ordered)) : int(0.6 * len(ordered)) + 1]
    means = {name: sum(one.get(name, 0.0) for one in some) / len(some) for name in TO_FIRST_TOKEN}
    return {name: round(mean, 2) for name, mean in means.items() if mean}


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
