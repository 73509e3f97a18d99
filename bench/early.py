"""Measure what is left of a handoff that began with its prompt, by the prompt's length.

Prompts of 1 to 64 steps of the engine, one at a time, in 1P1D: over shared memory, NIXL and TCP on one
machine, and over a wire of 1 Gbit/s between two hosts (network namespaces, mutual TLS). With `--staging-mib
64` the longest go through a window of it: an arm of its own, beside that with room for all. Early bytes are
those that were in the decode worker's cache before it heard that the prompt was complete. The rest of the
handoff lasts from the end of the last step until the decode worker's engine knows that all is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from baton.services.prefill.fair_share import CPU_STEP_TOKENS
from bench.model import MODEL_NAME, engine_settings, longer
from bench.path import stages
from bench.traffic import stream
from harness.deployment import deployment
from harness.links import Wire, why_not
from harness.stats import RESULTS, median, percentile, save
from harness.wired import wired

RESULT = "early"
STEPS = (1, 2, 4, 16, 64)
TOKENS = 4096  # of the longest prompt: those with more steps than it has are left out
GBIT = Wire(rate_mbit=1000)
ROOMY_MIB = 512  # staging that holds two of the longest prompts and more
GOAL = 0.8  # of the bytes of prompts of GOAL_STEPS and more
GOAL_STEPS = 4


def main(arguments: list[str]) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench early",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length")
    parser.add_argument(
        "--arm", choices=ARMS, action="append", help="one of them; the others keep their figures"
    )
    parser.add_argument("--staging-mib", type=int, default=ROOMY_MIB)
    parser.add_argument("--step-tokens", type=int, default=CPU_STEP_TOKENS, help="64: prompts of 64 steps")
    options = parser.parse_args(arguments)
    kept = RESULTS / f"{RESULT}.json"
    arms: dict[str, dict[str, Any]] = json.loads(kept.read_text())["arms"] if kept.is_file() else {}
    for arm in options.arm or ARMS:
        staging, step = options.staging_mib, options.step_tokens
        name = arm if staging == ROOMY_MIB else f"{arm}, staging of {staging} MiB"
        name += f", steps of {step} tokens" if step != CPU_STEP_TOKENS else ""
        print(name, flush=True)
        with ARMS[arm](staging, step) as (url, inside), inside:
            arms[name] = asyncio.run(measure(url, options.rounds, step, apart=arm in APART))
    save(RESULT, {"step_tokens": CPU_STEP_TOKENS, "goal": GOAL, "goal_steps": GOAL_STEPS, "arms": arms})


async def measure(url: str, rounds: int, step: int, *, apart: bool) -> dict[str, dict[str, float]]:
    """Return medians by the number of steps of `step` tokens; `apart`: the workers are on two hosts."""
    found = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        for steps in (steps for steps in STEPS if steps * step <= TOKENS):
            draw = random.Random(steps)
            # Not a whole step less: what is left after the last step is never a step's, but for one.
            prompts = [
                [draw.randrange(100, 4000) for _ in range(step * steps - 20)] for _ in range(rounds + 1)
            ]
            values = [await probe(http, url, prompt, apart=apart) for prompt in prompts][1:]
            found[f"{steps}"] = {key: round(median([one[key] for one in values]), 4) for key in values[0]}
            print(f"{steps:>3} steps: {found[str(steps)]}", flush=True)
            found[f"{steps}"]["rest_p95_ms"] = round(percentile([one["rest_ms"] for one in values], 0.95), 2)
    return found


async def probe(http: aiohttp.ClientSession, url: str, prompt: list[int], *, apart: bool) -> dict[str, float]:
    """Send a prompt, and return what its handoff brought and took.

    Between two hosts, whose clocks differ, the handoff's time begins when the decode worker hears of it.
    """
    before, had = await stages(http, url), await handed_over(http, url)
    answer = await stream(http, url, MODEL_NAME, prompt, 4)
    after, have = await stages(http, url), await handed_over(http, url)
    spent = {stage: after[stage] - before[stage] for stage in after}
    moved, early = (have[name] - had[name] for name in ("bytes", "early"))
    first, second, *_ = answer.arrivals
    before_it = 0.0 if apart else spent["save"] - spent["sample"]  # as in bench/path.py
    return {
        "mib": moved / 2**20,
        "early": early / moved,
        "left_mib": (moved - early) / 2**20,
        "rest_ms": 1e3 * (spent["total"] + before_it),
        "ttft_ms": 1e3 * (first - answer.asked),
        "second_token_ms": 1e3 * (second - first),
    }


async def handed_over(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the bytes of all handoffs so far, and how many of them came early."""
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    names = {"baton_router_handoff_bytes_total": "bytes", "baton_router_handoff_early_bytes_total": "early"}
    found = {"bytes": 0.0, "early": 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                found[names[sample.name]] += sample.value
    return found


Served = tuple[str, AbstractContextManager[Any]]  # a router's URL, and the network that it is in


def settings(staging_mib: int, step: int, **handoff: Any) -> dict[str, Any]:
    """Return the sections of settings for long prompts."""
    tokens = TOKENS + 64
    engine = engine_settings() | {"max_model_len": tokens, "model": str(longer(tokens)), "kv_cache_gib": 1}
    engine["max_num_batched_tokens"] = step
    every = {"idle_decode_tokens": 0}  # every prompt is handed over
    return {"engine": engine, "scheduler": every, "handoff": {"staging_mib": staging_mib, **handoff}}


@contextmanager
def here(transport: str, staging_mib: int, step: int) -> Iterator[Served]:
    """Serve on this machine."""
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder), **settings(staging_mib, step, transports=[transport])) as one,
    ):
        one.up(1, 1)
        yield one.url, nullcontext()


@contextmanager
def over(wire: Wire, staging_mib: int, step: int) -> Iterator[Served]:
    """Serve on two hosts, with a wire between."""
    if why := why_not():
        raise SystemExit(f"no wires: {why}")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        one = stack.enter_context(wired(Path(folder), config=settings(staging_mib, step)))
        one.links.be(wire)
        yield one.url, one.network.inside()


ARMS = {
    "shm": functools.partial(here, "shm"),
    "nixl": functools.partial(here, "nixl"),
    "tcp": functools.partial(here, "tcp"),
    "1 Gbit/s": functools.partial(over, GBIT),
}
APART = {"1 Gbit/s"}  # of them, those with a host for each worker
