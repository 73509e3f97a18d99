"""Measure how much of a handoff remains when the prompt is prefilled, by prompt length.

1P1D gets prompts of 1 to 64 engine steps, one at a time: over shared memory, NIXL and TCP on one machine, and
over a 1 Gbit/s wire between two hosts (network namespaces, mutual TLS). With `--staging-mib 64` the longest
prompts go through a window, which is a separate arm. Early bytes are those that reached the decode worker's
cache before it was told that the prompt was complete. The rest of the handoff lasts from the end of the last
prefill step until the decode engine has loaded everything.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from baton.services.prefill.fair_share import CPU_STEP_TOKENS
from bench.options import options
from bench.path import stages
from bench.served import MODEL_NAME, longer, up
from bench.traffic import stream
from harness.links import Wire, why_not
from harness.scrape import total
from harness.stats import median, percentile, save, saved
from harness.wired import wired

STEPS = (1, 2, 4, 16, 64)
TOKENS = 4096  # longest prompt
GBIT = Wire(rate_mbit=1000)
WIRED = "1 Gbit/s"
ARMS = ("shm", "nixl", "tcp", WIRED)
ROOMY_MIB = 512  # staging for more than two of the longest prompts
GOAL = 0.8  # share of early bytes, for prompts of GOAL_STEPS or more
GOAL_STEPS = 4


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(5, "prompts of each length"),
        arm=([str], "arms to measure; the others keep their figures", ARMS),
        staging_mib=ROOMY_MIB,
        step_tokens=(CPU_STEP_TOKENS, "64: prompts of 64 steps"),
    )
    staging, step = given.staging_mib, given.step_tokens
    arms: dict[str, dict[str, Any]] = saved("early").get("arms", {})
    for arm in given.arm or ARMS:
        name = arm if staging == ROOMY_MIB else f"{arm}, staging of {staging} MiB"
        name += f", steps of {step} tokens" if step != CPU_STEP_TOKENS else ""
        print(name, flush=True)
        with over(GBIT, staging, step) if arm == WIRED else here(arm, staging, step) as url:
            arms[name] = asyncio.run(measure(url, given.rounds, step, apart=arm == WIRED))
    save("early", {"step_tokens": CPU_STEP_TOKENS, "goal": GOAL, "goal_steps": GOAL_STEPS, "arms": arms})


async def measure(url: str, rounds: int, step: int, *, apart: bool) -> dict[str, dict[str, float]]:
    """Return medians by number of steps. step: its tokens; apart: the workers are on two hosts."""
    found = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        for steps in (steps for steps in STEPS if steps * step <= TOKENS):
            draw = random.Random(steps)
            # 20 tokens short, so that the last step is partial.
            prompts = [
                [draw.randrange(100, 4000) for _ in range(step * steps - 20)] for _ in range(rounds + 1)
            ]
            values = [await probe(http, url, prompt, apart=apart) for prompt in prompts][1:]
            found[f"{steps}"] = {key: round(median([one[key] for one in values]), 4) for key in values[0]}
            print(f"{steps:>3} steps: {found[str(steps)]}", flush=True)
            found[f"{steps}"]["rest_p95_ms"] = round(percentile([one["rest_ms"] for one in values], 0.95), 2)
    return found


async def probe(http: aiohttp.ClientSession, url: str, prompt: list[int], *, apart: bool) -> dict[str, float]:
    """Send a prompt and return the bytes and times of its handoff.

    Clocks of two hosts differ, so there the handoff's time begins when the decode worker hears of it.
    """
    before, had = stages(url), handed_over(url)
    answer = await stream(http, url, MODEL_NAME, prompt, 4)
    after, have = stages(url), handed_over(url)
    spent = {stage: after[stage] - before[stage] for stage in after}
    moved, early = (have[name] - had[name] for name in ("bytes", "early"))
    first, second, *_ = answer.arrivals
    before_it = 0.0 if apart else spent["save"] - spent["sample"]  # bench/path.py explains it
    return {
        "mib": moved / 2**20,
        "early": early / moved,
        "left_mib": (moved - early) / 2**20,
        "rest_ms": 1e3 * (spent["total"] + before_it),
        "ttft_ms": 1e3 * (first - answer.asked),
        "second_token_ms": 1e3 * (second - first),
    }


def handed_over(url: str) -> dict[str, float]:
    """Return the total and the early bytes of all handoffs so far."""
    names = {"bytes": "baton_router_handoff_bytes_total", "early": "baton_router_handoff_early_bytes_total"}
    return {key: total(url, name) for key, name in names.items()}


def settings(staging_mib: int, step: int, **handoff: Any) -> dict[str, Any]:
    """Return settings for long prompts that are always handed over."""
    engine = longer(TOKENS + 64) | {"kv_cache_gib": 1, "max_num_batched_tokens": step}
    scheduler = {"idle_decode_tokens": 0}
    return {"engine": engine, "scheduler": scheduler, "handoff": {"staging_mib": staging_mib, **handoff}}


@contextmanager
def here(transport: str, staging_mib: int, step: int) -> Iterator[str]:
    """Serve on this machine and yield the router's URL."""
    with up(**settings(staging_mib, step, transports=[transport])) as one:
        yield one.url


@contextmanager
def over(wire: Wire, staging_mib: int, step: int) -> Iterator[str]:
    """Serve on two hosts with a wire between them. The block runs inside their network."""
    if why := why_not():
        raise SystemExit(f"no wires: {why}")
    with (
        tempfile.TemporaryDirectory() as folder,
        wired(Path(folder), config=settings(staging_mib, step)) as one,
    ):
        one.links.be(wire)
        with one.network.inside():
            yield one.url
