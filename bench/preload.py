"""The effect of preloaded libraries on a CPU: `baton up` alone, with tcmalloc, Intel's OpenMP, or both.

    python -m bench preload --tcmalloc FOLDER/libtcmalloc_minimal.so.4 --iomp FOLDER/libiomp5.so

vLLM asks for both in LD_PRELOAD. tcmalloc is Debian's libtcmalloc-minimal4; libiomp5.so lies in the wheel
`intel-openmp` (`pip download --no-deps intel-openmp`, a zip file). Each way is `baton up` of
deploy/laptop.yaml with LD_PRELOAD in its environment: one prefill and one decode worker, a core each, with
drafts. They take turns, A B C D A B C D, each started anew. The run fails, and reports nothing, when a worker
has not loaded what it should have, when an answer differs from the one without, or with fewer than three
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import time
from pathlib import Path

import aiohttp
import yaml

from bench.prompts import held_out
from bench.traffic import Answer, stream
from harness.deployment import MODEL_NAME, Deployment, deployment
from harness.stats import median, medians, save
from harness.support import ROOT

STREAMS = {1: 12, 8: 48}  # streams: prompts of a measurement
TOKENS = 64  # of each answer
LEAST_ROUNDS = 3
PLAIN = "as it is"

Run = dict[str, float]
Answers = list[list[int]]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help=f"turns of each way; at least {LEAST_ROUNDS}")
    parser.add_argument("--tcmalloc", type=_library, required=True, metavar="FILE")
    parser.add_argument("--iomp", type=_library, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    ways: dict[str, list[Path]] = {
        PLAIN: [],
        "tcmalloc": [options.tcmalloc],
        "Intel OpenMP": [options.iomp],
        "both": [options.tcmalloc, options.iomp],
    }
    prompts = held_out("chat", max(STREAMS.values()))
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    expected: Answers | None = None
    for _ in range(options.rounds):
        for name, libraries in ways.items():
            figures, answers = measure(libraries, prompts)
            expected = expected or answers
            if answers != expected:
                raise SystemExit(
                    f"{name}: an answer is not the one of {PLAIN!r}: the figures would mean nothing"
                )
            runs[name].append(figures)
            print(f"{name:>14}", {key: round(value, 2) for key, value in figures.items()}, flush=True)
    if options.rounds < LEAST_ROUNDS:
        raise SystemExit(f"{options.rounds} round(s) are too few: give at least {LEAST_ROUNDS}")
    middle = {name: medians(them) for name, them in runs.items()}
    ratios = {
        name: medians([_ratios(*pair) for pair in zip(runs[name], runs[PLAIN], strict=True)]) for name in ways
    }
    for name in ways:
        print(f"{name:>14}", middle[name], "against", PLAIN, ratios[name])
    save(
        "preload",
        {"rounds": options.rounds, "tokens": TOKENS, "median": middle, "ratio": ratios, "runs": runs},
    )


def _library(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file")
    return path


def _ratios(run: Run, plain: Run) -> Run:
    return {key: run[key] / plain[key] for key in run}


def measure(libraries: list[Path], prompts: list[list[int]]) -> tuple[Run, Answers]:
    """Warm up a `baton up`; measure tokens/s of all streams and milliseconds a token of each."""
    config = yaml.safe_load((ROOT / "deploy" / "laptop.yaml").read_text())
    preload = {"LD_PRELOAD": ":".join(map(str, libraries))}
    figures: Run = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder) / "up", cold=True, environment=preload, **config) as one,
    ):
        one.up()
        check_loaded(one, libraries)
        answers, _ = asyncio.run(ask(one.url, prompts, max(STREAMS)))  # warm up
        for streams, count in STREAMS.items():
            found, took = asyncio.run(ask(one.url, prompts[:count], streams))
            if [answer.token_ids for answer in found] != [answer.token_ids for answer in answers[:count]]:
                raise SystemExit("an answer is not the one before: the figures would mean nothing")
            figures[f"tokens_per_s_{streams}"] = sum(answer.tokens for answer in found) / took
            # Timed from the request: drafted tokens arrive in bunches, so that the first token is no start.
            each = [1e3 * (answer.arrivals[-1] - answer.asked) / answer.tokens for answer in found]
            figures[f"ms_per_token_{streams}"] = median(each)
    return figures, [answer.token_ids for answer in answers]


def check_loaded(one: Deployment, libraries: list[Path]) -> None:
    """Check that the libraries are loaded: LD_PRELOAD silently skips others. Raises SystemExit."""
    for worker in one.describe().workers:
        name = worker.identity.worker_id
        mapped = {part.path for part in one.worker_process(name).memory_maps()}
        missing = [str(path) for path in libraries if str(path) not in mapped]
        if missing:
            raise SystemExit(f"{name} has not loaded {', '.join(missing)}: the figures would mean nothing")


async def ask(url: str, prompts: list[list[int]], streams: int) -> tuple[list[Answer], float]:
    """Return the answers in the prompts' order, requested `streams` at a time, and the seconds for all."""
    gc.collect()
    turn = asyncio.Semaphore(streams)

    async def answer(http: aiohttp.ClientSession, prompt: list[int]) -> Answer:
        async with turn:
            return await stream(http, url, MODEL_NAME, prompt, TOKENS)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        began = time.perf_counter()
        found = await asyncio.gather(*(answer(http, prompt) for prompt in prompts))
        return list(found), time.perf_counter() - began
