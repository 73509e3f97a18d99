"""The time from the command to the first token: `baton up` (two engines) against one stock vLLM server."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import aiohttp

from bench.traffic import stream
from harness.deployment import MODEL_NAME, deployment, stock_vllm
from harness.stats import median, save


async def first_token(url: str) -> None:
    """Request an answer of a single token."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        await stream(http, url, MODEL_NAME, [7, 8, 9], 1)


def baton(folder: Path) -> float:
    began = time.perf_counter()
    with deployment(folder, cold=True) as one:
        asyncio.run(first_token(one.up().url))
        return time.perf_counter() - began


def stock(folder: Path) -> float:
    began = time.perf_counter()
    with stock_vllm(folder, cold=True) as (url, _):
        asyncio.run(first_token(url))
        return time.perf_counter() - began


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="A B pairs")
    options = parser.parse_args(arguments)
    runs: dict[str, list[float]] = {"baton up": [], "stock vLLM": []}
    for number in range(options.rounds + 1):  # the first pair fills the page cache and does not count
        for name, start in (("baton up", baton), ("stock vLLM", stock)):
            with tempfile.TemporaryDirectory() as folder:
                took = start(Path(folder) / str(number))
            if number:
                runs[name].append(took)
            print(f"{name:>12} {took:6.1f} s", flush=True)
    middle = {name: round(median(values), 2) for name, values in runs.items()}
    ratio = middle["baton up"] / middle["stock vLLM"]
    print(middle, f"ratio {ratio:.2f} (goal <= 1.3)")
    save("startup", {"median_s": middle, "ratio (goal <= 1.3)": ratio, "runs_s": runs})
