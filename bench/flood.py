"""Measure what one tenant's flood costs another.

1P1D of the demo model, and a calm tenant that sends at random times, the same in each arm of a round. It is
alone, or another tenant sends as many requests as its limit admits, or ten times as many. The figure is the
calm tenant's time to first token. The arm within the limit separates the cost of admitted requests from that
of the refused flood. The load generator shares the cores and runs at nice 10.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from baton.services.tenants.file_book import FileBook
from baton.services.tenants.model import ApiKey, Book, Tenant, digest
from bench.light import Client, Reply, body, latencies, opened, ttfts
from bench.options import options
from bench.served import no_pauses, up
from harness.deployment import ENGINE, MODEL, MODEL_NAME
from harness.stats import percentile, save
from harness.support import listener

TIMES = 10  # the flood's rate, as a multiple of the limit
GOAL_TTFT = 1.2
PROMPT_TOKENS, ANSWER_TOKENS = 32, 8
CALM_PER_S = 10.0  # requests/s of the calm tenant
ALONE, WITHIN, FLOODED = ARMS = "alone", "beside one within its limit", "beside a flood"
SAMPLES = 1_000  # bootstrap samples of the rounds
FLOOD_LIMIT = 2  # requests/s of the flooding tenant
VOCABULARY = 1, 250


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(8, "of the three arms"),
        seconds=(8.0, "of an arm in a round"),
    )
    felt = measure_felt(given.rounds, given.seconds)
    print(json.dumps(felt, indent=2), flush=True)
    save("flood", {"times": TIMES, "felt": felt})


def measure_felt(rounds: int, seconds: float) -> dict[str, Any]:
    engine = {**ENGINE, "model": str(MODEL), "speculative_config": None}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        write(keys, {"calm": Tenant(), "flood": Tenant(requests_per_s=FLOOD_LIMIT)})
        with up(engine=engine, router={"keys_file": str(keys)}) as one, no_pauses():
            os.nice(10)  # this process alone: the deployment has started
            return asyncio.run(in_turns(one.port, listener(one.port), rounds, seconds))


async def in_turns(port: int, router: psutil.Process, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure the arms, in a different order each round."""
    calm, flood, draw = Client(port, "calm"), Client(port, "flood"), random.Random(1)
    make = partial(body, draw, PROMPT_TOKENS, ANSWER_TOKENS, model=MODEL_NAME, vocabulary=VOCABULARY)
    found: dict[str, list[list[Reply]]] = {arm: [] for arm in ARMS}
    others: dict[str, list[Reply]] = {WITHIN: [], FLOODED: []}
    cpu_s = dict.fromkeys(ARMS, 0.0)  # CPU time of the router
    order = list(ARMS)
    await opened(calm, make, CALM_PER_S, min(5.0, seconds), draw)  # warm
    for number in range(rounds):
        for arm in order:
            asked = [opened(calm, make, CALM_PER_S, seconds, random.Random(number))]
            if arm == WITHIN:
                asked.append(opened(flood, make, FLOOD_LIMIT, seconds, None))
            elif arm == FLOODED:
                asked.append(opened(flood, make, TIMES * FLOOD_LIMIT, seconds, draw))
            before = _cpu_s(router)
            mine, *other = await asyncio.gather(*asked)
            cpu_s[arm] += _cpu_s(router) - before
            found[arm].append(mine)
            for replies in other:
                others[arm] += replies
        order.append(order.pop(0))
    await calm.close()
    await flood.close()
    return {
        "rounds": rounds,
        "seconds": seconds,
        "calm_per_s": CALM_PER_S,
        "arms": {
            arm: figures([reply for each in replies for reply in each]) for arm, replies in found.items()
        },
        "limit_per_s": FLOOD_LIMIT,
        "other": {arm: other_figures(replies) for arm, replies in others.items()},
        "router_cpu_s": {arm: round(seconds, 2) for arm, seconds in cpu_s.items()},
        "ttft_p99_against": {
            against: ratios(found[FLOODED], found[against], draw) for against in (ALONE, WITHIN)
        },
        "goal": GOAL_TTFT,
    }


def other_figures(replies: list[Reply]) -> dict[str, Any]:
    refused = [1e3 * one.took for one in replies if one.status == 429]
    return {
        "sent": len(replies),
        "statuses": dict(Counter(str(one.status) for one in replies)),
        "refused_p50_ms": round(percentile(refused, 0.5), 2) if refused else None,
    }


def ratios(flooded: list[list[Reply]], other: list[list[Reply]], draw: random.Random) -> dict[str, float]:
    """Return the ratio of two arms' p99, and its 90 % bootstrap interval: `low` to `high`."""
    pairs = list(zip(flooded, other, strict=True))

    def ratio(some: list[tuple[list[Reply], list[Reply]]]) -> float:
        one, two = (
            percentile(ttfts([reply for each in arm for reply in each]), 0.99)
            for arm in zip(*some, strict=True)
        )
        return one / two

    sampled = [ratio(draw.choices(pairs, k=len(pairs))) for _ in range(SAMPLES)]
    found = {"ratio": ratio(pairs), "low": percentile(sampled, 0.05), "high": percentile(sampled, 0.95)}
    return {name: round(value, 2) for name, value in found.items()}


def figures(replies: list[Reply]) -> dict[str, float]:
    found = latencies(replies)
    return {**found, "not_answered": len(replies) - found["answers"]}


def write(path: Path, tenants: dict[str, Tenant]) -> None:
    """Write a keys file in which each tenant's key is its name."""
    keys = {name: ApiKey(tenant=name, sha256=digest(name.encode()).hex()) for name in tenants}
    asyncio.run(FileBook(str(path)).edit(lambda _: Book(tenants=tenants, keys=keys)))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
