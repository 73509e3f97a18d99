"""The handoff of a long prompt in a real deployment, stage by stage: idle, and beside four running streams.

It lasts from the end of the prefill's last step until the decode worker's engine knows that the KV is loaded,
which is when its next step can take the request; the save, a part of that step, counts too. Times come from
the router's own histograms, whose sums are exact for one request at a time. `sample` is the rest of the last
step after its save, the logits and the sampling of the first token, and no part of the total.

    total = save + (word between the workers + wait + move + check + load + time until the engine's next step)
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from baton.handoff import transports
from bench.model import MODEL_NAME, engine_settings
from bench.traffic import Mix, run, stream
from harness.deployment import Deployment, deployment
from harness.stats import median, percentile, save

STAGES = ("save", "sample", "wait", "move", "check", "load", "total")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="prompts a transport, idle and busy, in tens")
    parser.add_argument("--tokens", type=int, default=900)
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        arms = {name: stack.enter_context(up(name)) for name in transports.possible()}
        for one in arms.values():
            asyncio.run(run(Mix(seconds=5), one.url, MODEL_NAME, seed=0))
        for busy in (False, True):
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
            for number in range(math.ceil(options.rounds / 10)):  # A B A B
                for name, one in arms.items():
                    runs[name] += asyncio.run(probe(one, 10, options.tokens, busy=busy, seed=number))
            for name, values in runs.items():
                key = f"{name}, busy" if busy else name
                results[key] = {
                    stage: round(median([value[stage] for value in values]), 2) for stage in STAGES
                }
                results[key]["total_p95"] = round(percentile([value["total"] for value in values], 0.95), 2)
                results[key]["requests"] = len(values)
                print(f"{key:>11}", results[key], flush=True)
    save("path", {"tokens": options.tokens, "median_ms": results})


@contextmanager
def up(transport: str) -> Iterator[Deployment]:
    """Start 1P1D with one transport alone."""
    config: dict[str, Any] = {"engine": engine_settings(), "handoff": {"transports": [transport]}}
    with tempfile.TemporaryDirectory() as folder, deployment(Path(folder) / transport, **config) as one:
        yield one.up(1, 1)


async def probe(one: Deployment, count: int, tokens: int, *, busy: bool, seed: int) -> list[dict[str, float]]:
    """Send long prompts one after the other. Return the stages of each in milliseconds."""
    draw = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=300)
    results = []
    async with aiohttp.ClientSession(timeout=timeout) as http:

        def prompt(length: int) -> list[int]:
            return [draw.randrange(100, 4000) for _ in range(length)]

        # One long answer each, begun before the first probe: no handoff but the probes' own while they run.
        streams = [
            asyncio.create_task(stream(http, one.url, MODEL_NAME, prompt(32), 900)) for _ in range(4 * busy)
        ]
        if busy:
            await asyncio.sleep(1.0)
        for _ in range(count):
            before = await stages(http, one.url)
            await stream(http, one.url, MODEL_NAME, prompt(tokens), 2)
            after = await stages(http, one.url)
            took = {stage: 1e3 * (after[stage] - before[stage]) for stage in STAGES}
            took["total"] += took["save"] - took["sample"]  # the worker counts from the save's end
            results.append(took)
        still_busy = all(not task.done() for task in streams)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    if busy and not still_busy:
        raise RuntimeError("the streams ended before the probes did: make their answers longer")
    return results


async def stages(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the sum of each stage over all requests so far, in seconds: total from the save's end."""
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    sums = dict.fromkeys(STAGES, 0.0)
    for family in text_string_to_metric_families(text):
        if family.name == "baton_router_handoff_stage_seconds":
            for sample in family.samples:
                if sample.name.endswith("_sum"):
                    sums[sample.labels["stage"]] += sample.value
    return sums
