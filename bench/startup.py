"""Measure the time from the command to the first token: `baton up` (two engines) and stock vLLM."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import aiohttp

from bench.options import options
from bench.served import in_turns
from bench.traffic import stream
from harness.deployment import MODEL_NAME, deployment, stock_vllm
from harness.stats import median, save


@contextmanager
def baton(folder: Path) -> Iterator[str]:
    with deployment(folder, cold=True) as one:
        yield one.up().url


@contextmanager
def stock(folder: Path) -> Iterator[str]:
    with stock_vllm(folder, cold=True) as (url, _):
        yield url


def first_token_s(serve: Callable[[Path], AbstractContextManager[str]], _: int) -> dict[str, float]:
    """Start a server and return the seconds until a request has its first token."""

    async def ask(url: str) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            await stream(http, url, MODEL_NAME, [7, 8, 9], 1)

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as url:
        asyncio.run(ask(url))
        return {"s": time.perf_counter() - began}


def main(arguments: list[str]) -> None:
    given = options(__doc__, arguments, rounds=(3, "A B pairs"))
    # The first pair warms the page cache and does not count.
    runs = in_turns({"baton up": baton, "stock vLLM": stock}, given.rounds + 1, first_token_s)
    seconds = {name: [one["s"] for one in them[1:]] for name, them in runs.items()}
    middle = {name: round(median(values), 2) for name, values in seconds.items()}
    ratio = middle["baton up"] / middle["stock vLLM"]
    print(middle, f"ratio {ratio:.2f} (goal <= 1.3)")
    save("startup", {"median_s": middle, "ratio (goal <= 1.3)": ratio, "runs_s": seconds})
