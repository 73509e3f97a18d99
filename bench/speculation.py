"""Measure the time per output token with and without each speculative method: the demo model, over HTTP.

1P1D has an engine on each of two cores; `aggregated` is one mixed worker on both. Router and scheduler share
the cores. The deployment without drafts stays up; each method's deployment starts next to it, and the two
alternate. `auto` chooses the number of drafted tokens; `--fixed` adds deployments with fixed numbers.

Answers are greedy: a method that changes them gets no figures.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import aiohttp

from bench.options import options
from bench.prompts import FOLDER, KINDS, held_out
from bench.served import up
from bench.traffic import Answer, stream
from harness.deployment import MODEL_NAME
from harness.stats import median, save

PLACEMENTS = {"1P1D": (1, 1, 0), "aggregated": (0, 0, 1)}
PROMPTS = {1: 8, 4: 24, 16: 64}  # streams -> prompts of a measurement
SHORTEST, LONGEST = 32, 192  # tokens of an answer; shorter ones are mostly prefill
EQUAL = 0.95  # share of equal answers; the batch's shape may break near-ties
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "kv_cache_gib": 0.25,
    "enable_prefix_caching": False,
}
PLAIN, MTP, EAGLE3 = (str(FOLDER / name) for name in ("weights", "weights-mtp", "eagle3"))
# Prompts repeat; without this, suffixes would match the answer of an earlier round.
NO_PAST = {"suffix_decoding_max_cached_requests": 0}
# The demo model's MTP layer was trained to draft several tokens ahead.
HYBRID = {"method": "mtp", "max_speculative_tokens": 10, "num_model_steps": 4}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": (PLAIN, {"method": "ngram", "max_speculative_tokens": 4}),
    "suffix": (PLAIN, {"method": "suffix", "max_speculative_tokens": 10, **NO_PAST}),
    "mtp": (MTP, {"method": "mtp", "max_speculative_tokens": 6}),
    "eagle3": (PLAIN, {"method": "eagle3", "max_speculative_tokens": 6, "model": EAGLE3}),
    "mtp + ngram": (MTP, {**HYBRID, "mtp_strategy": "with_ngram"}),
    "mtp + suffix": (MTP, {**HYBRID, "mtp_strategy": "with_suffix", **NO_PAST}),
}
Asked = list[tuple[list[int], int]]  # prompts, and the tokens of their answers


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(3, "turns of each deployment"),
        methods=(list(METHODS), None, METHODS),
        fixed=([int], "numbers of drafted tokens in addition to auto"),
    )
    served: dict[str, Any] = {}
    for placement, fleet in PLACEMENTS.items():
        with up(*fleet, engine={**ENGINE, "model": PLAIN, "speculative_config": None}) as plain:
            asked = {kind: asyncio.run(lengthy(plain.url, held_out(kind, 192))) for kind in KINDS}
            for method in given.methods:
                for number in ("auto", *given.fixed):
                    name = method if number == "auto" else f"{method}, {number}"
                    with up(*fleet, engine=engine_of(method, number)) as one:
                        found = compare({"none": plain.url, name: one.url}, asked, given.rounds)
                    served.setdefault(placement, {})[name] = found
                    print(placement, name, found, flush=True)
    save("speculation", {"served_rounds": given.rounds, "served": served})


def engine_of(method: str, number: int | str) -> dict[str, Any]:
    """Return the settings of an engine that drafts `number` tokens per step."""
    model, spec = METHODS[method]
    spec = {**spec, "num_speculative_tokens": number}
    if isinstance(number, int):
        del spec["max_speculative_tokens"]
        if "num_model_steps" in spec:
            spec["num_model_steps"] = min(number, spec["num_model_steps"])
    return {**ENGINE, "model": model, "speculative_config": spec}


async def lengthy(url: str, prompts: list[list[int]]) -> Asked:
    """Return the prompts whose answers have at least SHORTEST tokens, with those lengths."""
    turn = asyncio.Semaphore(16)

    async def length(http: aiohttp.ClientSession, prompt: list[int]) -> int:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": LONGEST, "temperature": 0}
        async with turn, http.post(f"{url}/v1/completions", json=body) as response:
            return int((await response.json())["usage"]["completion_tokens"])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        lengths = await asyncio.gather(*(length(http, prompt) for prompt in prompts))
    return [pair for pair in zip(prompts, lengths, strict=True) if pair[1] >= SHORTEST]


def compare(urls: dict[str, str], asked: dict[str, Asked], rounds: int) -> dict[str, Any]:
    """Return ms per token by kind, streams and deployment. Raises RuntimeError if answers differ."""
    found: dict[str, Any] = {}
    for kind, pairs in asked.items():
        first, second = (
            asyncio.run(answers(url, pairs[: max(PROMPTS.values())], 16)) for url in urls.values()
        )
        equal = sum(one.token_ids == two.token_ids for one, two in zip(first, second, strict=True))
        if equal < EQUAL * len(first):
            raise RuntimeError(
                f"{[*urls][1]}: only {equal} of {len(first)} answers equal those without drafts"
            )
        for streams, count in PROMPTS.items():
            ms: dict[str, list[float]] = {name: [] for name in urls}
            for _ in range(rounds):
                for name, url in urls.items():
                    gc.collect()
                    got = asyncio.run(answers(url, pairs[:count], streams))
                    # Drafted tokens arrive in bunches, so the time is measured from the request.
                    each = [1e3 * (one.arrivals[-1] - one.asked) / one.tokens for one in got]
                    ms[name].append(median(each))
            row = {name: round(median(values), 3) for name, values in ms.items()}
            found.setdefault(kind, {})[str(streams)] = row
    return found


async def answers(url: str, asked: Asked, streams: int) -> list[Answer]:
    """Return the answers in the prompts' order, with `streams` requests at a time."""
    turn = asyncio.Semaphore(streams)

    async def answer(http: aiohttp.ClientSession, prompt: list[int], length: int) -> Answer:
        async with turn:
            return await stream(http, url, MODEL_NAME, prompt, length)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        return await asyncio.gather(*(answer(http, *pair) for pair in asked))
