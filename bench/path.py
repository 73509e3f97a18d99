"""Measure a long prompt's handoff in a real deployment stage by stage: idle, and with four running streams.

A handoff lasts from the end of the last prefill step until the decode engine has loaded the KV and its next
step can include the request. The save, a part of that prefill step, counts too. Times come from the router's
histograms, whose sums are exact for one request at a time. `sample`, the rest of the last prefill step after
the save (logits and sampling), is not part of the total.

    total = save + (message to the decode worker + wait + move + check + load + wait for the next step)
"""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import ExitStack
from typing import Any

import aiohttp

from baton.handoff import transports
from bench.options import options
from bench.served import MODEL_NAME, up
from bench.traffic import Mix, run, stream
from harness.scrape import samples
from harness.stats import median, percentile, save

STAGES = ("save", "sample", "wait", "move", "check", "load", "total")


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(30, "prompts per transport, idle and busy; a multiple of ten"),
        tokens=(900, "of a prompt"),
    )
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(up(handoff={"transports": [name]})).url
            for name in transports.possible()
        }
        for url in urls.values():
            asyncio.run(run(Mix(seconds=5), url, MODEL_NAME, seed=0))
        for busy in (False, True):
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
            for number in range(math.ceil(given.rounds / 10)):  # A B A B
                for name, url in urls.items():
                    runs[name] += asyncio.run(probe(url, 10, given.tokens, busy=busy, seed=number))
            for name, values in runs.items():
                key = f"{name}, busy" if busy else name
                results[key] = {
                    stage: round(median([value[stage] for value in values]), 2) for stage in STAGES
                }
                results[key]["total_p95"] = round(percentile([value["total"] for value in values], 0.95), 2)
                results[key]["requests"] = len(values)
                print(f"{key:>11}", results[key], flush=True)
    save("path", {"tokens": given.tokens, "median_ms": results})


async def probe(url: str, count: int, tokens: int, *, busy: bool, seed: int) -> list[dict[str, float]]:
    """Send long prompts one after another. Return each one's stages in ms."""
    draw, results = random.Random(seed), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:

        def prompt(length: int) -> list[int]:
            return [draw.randrange(100, 4000) for _ in range(length)]

        # Each stream is one long answer that starts before the first probe, so no other handoff runs.
        streams = [
            asyncio.create_task(stream(http, url, MODEL_NAME, prompt(32), 900)) for _ in range(4 * busy)
        ]
        if busy:
            await asyncio.sleep(1.0)
        for _ in range(count):
            before = await asyncio.to_thread(stages, url)
            await stream(http, url, MODEL_NAME, prompt(tokens), 2)
            after = await asyncio.to_thread(stages, url)
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


def stages(url: str) -> dict[str, float]:
    """Return each stage's sum over all requests so far, in seconds; `total` begins at the save's end."""
    sums = dict.fromkeys(STAGES, 0.0)
    for sample in samples(url):
        if sample.name == "baton_router_handoff_stage_seconds_sum":
            sums[sample.labels["stage"]] += sample.value
    return sums
