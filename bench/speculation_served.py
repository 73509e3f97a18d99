"""Deployments with each speculative method against one without, over HTTP.

Each is on both cores: 1P1D has an engine on each, aggregated is one mixed worker on both; router and
scheduler share the cores. The one without stays up, those with take turns beside it.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bench.traffic import stream
from harness.deployment import MODEL_NAME, deployment
from harness.stats import median

PLACEMENTS = {"1P1D": (1, 1, 0), "aggregated": (0, 0, 1)}
PROMPTS = {1: 8, 4: 24, 16: 64}  # of a measurement, by streams
SHORTEST = 32  # tokens of an answer: the first ones cost most, and decoding is to be measured

Pairs = list[tuple[list[int], int]]  # prompts, and the tokens of their answers


def serve(
    plain: dict[str, Any],
    methods: dict[str, dict[str, Any]],
    asked: dict[str, Pairs],
    streams: Sequence[int],
    rounds: int,
) -> dict[str, Any]:
    """Measure: placement -> method -> kind of prompt -> streams -> milliseconds a token without and with.

    `plain` and `methods` are settings of the engines; `asked` holds the prompts by kind.
    """
    results: dict[str, Any] = {}
    for placement, fleet in PLACEMENTS.items():
        with tempfile.TemporaryDirectory() as folder, deployment(Path(folder), engine=plain) as without:
            base = without.up(*fleet).url
            _warm(base, asked)
            for number, (name, engine) in enumerate(methods.items()):
                with deployment(Path(folder) / str(number), engine=engine) as one:
                    url = one.up(*fleet).url
                    _warm(url, asked)
                    for kind, pairs in asked.items():
                        for load in streams:
                            row = _turns({"none": base, name: url}, pairs[: PROMPTS[load]], load, rounds)
                            found = results.setdefault(placement, {}).setdefault(name, {})
                            found.setdefault(kind, {})[str(load)] = row
                            print(f"{placement:>12} {kind:>10} {load:>2}", row, flush=True)
    return results


def _turns(urls: dict[str, str], asked: Pairs, streams: int, rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in urls}
    for _ in range(rounds):
        for name, url in urls.items():
            found[name].append(asyncio.run(_drive(url, asked, streams)))
    return {name: round(median(values), 3) for name, values in found.items()}


def _warm(url: str, asked: dict[str, Pairs]) -> None:
    for pairs in asked.values():
        asyncio.run(_drive(url, pairs[: max(PROMPTS.values())], 16))


async def _drive(url: str, asked: Pairs, streams: int) -> float:
    """Request the answers, so many at a time. Return the median of milliseconds a token of an answer.

    Timed from the request to the last token: drafted tokens arrive in bunches, so the first is no start.
    """
    gc.collect()
    waiting = list(asked)
    found: list[float] = []

    async def one(http: aiohttp.ClientSession) -> None:
        while waiting:
            prompt, length = waiting.pop(0)
            answer = await stream(http, url, MODEL_NAME, prompt, length)
            found.append(1e3 * (answer.arrivals[-1] - answer.asked) / length)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        await asyncio.gather(*(one(http) for _ in range(streams)))
    return median(found)
