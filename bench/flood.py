"""Measure what one tenant's flood costs another, and whether two routers enforce its limits together.

`felt`: 1P1D of the demo model, and a calm tenant that sends at random times, the same in each arm of a round.
It is alone, or another tenant sends as many requests as its limit admits, or ten times as many. The figure is
the calm tenant's time to first token. The arm within the limit separates the cost of admitted requests from
that of the refused flood.

`held`: two routers that share a Redis, in front of a worker without an engine (as in bench/router.py), and
one tenant that sends ten times its limit, half of it to each router. The figure is the admitted load against
the limit: the rate times the seconds, plus one bucket, which is full at the start.

The load generator shares the cores and runs at nice 10. Everything takes about five minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from baton.services.tenants.file_book import FileBook
from baton.services.tenants.model import ApiKey, Book, Tenant, digest
from bench.light import Client, Make, Reply, body, latencies, opened, ttfts
from bench.options import options
from bench.router import MODEL as FAKE_MODEL
from bench.router import router, worker
from bench.served import no_pauses, up
from harness.checkpoints import tiny_qwen2
from harness.deployment import ENGINE, MODEL, MODEL_NAME
from harness.scheduling import RedisServer
from harness.stats import percentile, save
from harness.support import free_port, listener

TIMES = 10  # the flood's rate, as a multiple of the limit
GOAL_TTFT, GOAL_HELD = 1.2, 0.05
PROMPT_TOKENS, ANSWER_TOKENS = 32, 8
CALM_PER_S = 10.0  # requests/s of the calm tenant
ALONE, WITHIN, FLOODED = ARMS = "alone", "beside one within its limit", "beside a flood"
SAMPLES = 1_000  # bootstrap samples of the rounds
FLOOD_LIMIT = 2  # requests/s of the flooding tenant
HELD = {"requests_per_s": 20, "tokens_per_min": 12_000, "concurrency": 12}
HELD_TOKENS = 50  # per request, prompt and answer together
LONG_TOKENS = 200  # per answer (0.4 s) when concurrent requests are counted
HELD_STEP_MS = 2.0
PAUSE_S = 0.25  # the pause after a refusal, which lets the generator keep up
VOCABULARY = 1, 250


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        rounds=(8, "of the three arms"),
        seconds=(8.0, "of an arm in a round"),
        held_seconds=(20.0, "of each limit"),
    )
    felt = measure_felt(given.rounds, given.seconds)
    print(json.dumps(felt, indent=2), flush=True)
    held = measure_held(given.held_seconds)
    print(json.dumps(held, indent=2), flush=True)
    save("flood", {"times": TIMES, "felt": felt, "held": held})


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


def measure_held(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        redis = stack.enter_context(RedisServer(folder))
        keys = folder / "keys.yaml"
        write(keys, {field: Tenant(**{field: most}) for field, most in HELD.items()})
        model, scheduler, ports = tiny_qwen2(folder / "model"), free_port(), [free_port(), free_port()]
        stack.enter_context(worker(scheduler, HELD_STEP_MS))
        for port in ports:
            shared = {"keys_file": str(keys), "keys_store": redis.url}
            stack.enter_context(router(folder, port, scheduler, model, **shared))
        return {field: asyncio.run(flooded(ports, field, seconds)) for field in HELD}


async def flooded(ports: list[int], field: str, seconds: float) -> dict[str, Any]:
    """Send ten times what a limit admits, half to each router. Return how much was admitted."""
    clients, draw = [Client(port, field) for port in ports], random.Random(2)
    most = HELD[field]
    prompt = HELD_TOKENS - ANSWER_TOKENS
    make = partial(body, draw, prompt, ANSWER_TOKENS, model=FAKE_MODEL, vocabulary=VOCABULARY)
    try:
        if field == "concurrency":
            return await crowded(clients, make, most, seconds)
        unit = HELD_TOKENS if field == "tokens_per_min" else 1
        per_s = most / unit / (60 if field == "tokens_per_min" else 1)
        bucket = most / unit
        began = time.perf_counter()
        replies = await asyncio.gather(
            *(opened(client, make, TIMES * per_s / len(ports), seconds, draw) for client in clients),
            *(burst(client, make, round(bucket)) for client in clients),
        )
        # The last request is admitted later than it was sent if the machine is busy.
        took = max(reply.arrivals[0] for each in replies for reply in each if reply.arrivals) - began
    finally:
        for client in clients:
            await client.close()
    statuses = Counter(str(reply.status) for each in replies for reply in each)
    allowed = bucket + per_s * took
    return {
        "limit": most,
        "sent": sum(statuses.values()),
        "statuses": dict(statuses),
        "allowed": round(allowed, 1),
        "off": round(statuses["200"] / allowed - 1, 4),
        "goal": GOAL_HELD,
    }


async def burst(client: Client, make: Make, count: int) -> list[Reply]:
    """Send `count` requests, eight at a time, which empties the bucket."""
    replies: list[Reply] = []

    async def some() -> None:
        while len(replies) < count:
            replies.append(await client.post("/v1/completions", make()))

    await asyncio.gather(*(some() for _ in range(8)))
    return replies


async def crowded(clients: list[Client], make: Make, most: int, seconds: float) -> dict[str, Any]:
    """Keep ten times as many requests in flight as the limit. Return how many were admitted at a time."""
    statuses: Counter[str] = Counter()
    until = time.perf_counter() + seconds

    async def loop(client: Client) -> None:
        while time.perf_counter() < until:
            reply = await client.post("/v1/completions", {**make(), "max_tokens": LONG_TOKENS})
            statuses[str(reply.status)] += 1
            if reply.status == 200:
                spans.append((reply.arrivals[0], reply.arrivals[-1]))
            else:
                await asyncio.sleep(PAUSE_S)

    spans: list[tuple[float, float]] = []  # first and last token of each answer
    await asyncio.gather(*(loop(clients[at % len(clients)]) for at in range(TIMES * most)))
    held = at_a_time(spans)
    return {
        "limit": most,
        "sent": sum(statuses.values()),
        "statuses": dict(statuses),
        "usual": held(0.5),
        "p99": held(0.99),
        "peak": held(1.0),  # measured with this process's clock, which may lag
        "off": round(held(0.99) / most - 1, 4),
        "goal": GOAL_HELD,
    }


def at_a_time(spans: list[tuple[float, float]]) -> Callable[[float], int]:
    """Return a function: the most `spans` that were concurrent during a given share of the time."""
    moments = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    lasted: dict[int, float] = defaultdict(float)  # concurrent spans -> seconds
    under_way = 0
    for (moment, change), (next_moment, _) in pairwise(moments):
        under_way += change
        lasted[under_way] += next_moment - moment

    def held(share: float) -> int:
        left = share * sum(lasted.values())
        for number in sorted(lasted):
            left -= lasted[number]
            if left <= 0:
                break
        return number

    return held


def write(path: Path, tenants: dict[str, Tenant]) -> None:
    """Write a keys file in which each tenant's key is its name."""
    keys = {name: ApiKey(tenant=name, sha256=digest(name.encode()).hex()) for name in tenants}
    asyncio.run(FileBook(str(path)).edit(lambda _: Book(tenants=tenants, keys=keys)))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
