"""A tenant that floods: what another one feels of it, and whether two routers hold its limits together.

`felt`: 1P1D of the demo model, and a tenant that sends at random times. In turns it is alone, or another
tenant sends ten times as many requests as its limit admits. What counts is the first one's time to first
token.

`held`: two routers that share a Redis, in front of a worker without an engine (as in bench/router.py), and
one tenant that sends ten times its limit, half of it to each. What counts is what was admitted against the
limit: the rate times the seconds, and one bucket, which is full when it begins.

The load generator shares the cores; it runs at nice 10 and uses a light HTTP client (bench/light.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from baton.services.tenants.file_book import FileBook
from baton.services.tenants.model import ApiKey, Book, Tenant, digest
from bench.light import Client, Reply
from bench.router import MODEL as FAKE_MODEL
from bench.router import child, wait_ready
from harness.checkpoints import tiny_qwen2
from harness.deployment import ENGINE, MODEL, MODEL_NAME, deployment
from harness.scheduling import RedisServer
from harness.stats import percentile, save
from harness.support import free_port

TIMES = 10  # the limit
GOAL_TTFT, GOAL_HELD = 1.2, 0.05
PROMPT_TOKENS, ANSWER_TOKENS = 32, 8
CALM_PER_S = 6.0  # requests of the tenant that does not flood
FLOOD_LIMIT = 2  # requests a second of the one that does
HELD = {"requests_per_s": 20, "tokens_per_min": 12_000, "concurrency": 12}
HELD_TOKENS = 50  # of a request, prompt and answer
LONG_TOKENS = 200  # of an answer, where requests at a time are counted: 0.4 s
HELD_STEP_MS = 2.0

Make = Callable[[], dict[str, Any]]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4, help="of each, alone and beside a flood")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a round, and of each limit")
    options = parser.parse_args(arguments)
    felt = measure_felt(options.rounds, options.seconds)
    print(json.dumps(felt, indent=2), flush=True)
    held = measure_held(options.seconds)
    print(json.dumps(held, indent=2), flush=True)
    save("flood", {"times": TIMES, "seconds": options.seconds, "felt": felt, "held": held})


# -- what another tenant feels


def measure_felt(rounds: int, seconds: float) -> dict[str, Any]:
    engine = {**ENGINE, "model": str(MODEL), "speculative_config": None}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        write(keys, {"calm": Tenant(), "flood": Tenant(requests_per_s=FLOOD_LIMIT)})
        with deployment(Path(folder) / "one", engine=engine, router={"keys_file": str(keys)}) as one:
            one.up(1, 1)
            os.nice(10)  # this process: the deployment's are started
            return asyncio.run(in_turns(one.port, rounds, seconds))


async def in_turns(port: int, rounds: int, seconds: float) -> dict[str, Any]:
    calm, flood, draw = Client(port, "calm"), Client(port, "flood"), random.Random(1)
    found: dict[str, list[Reply]] = {"alone": [], "beside a flood": []}
    floods: list[Reply] = []
    gc.collect()
    gc.disable()  # our own pauses would look like the server's
    try:
        make = partial(body, draw, MODEL_NAME)
        await opened(calm, make, CALM_PER_S, min(5.0, seconds), draw)  # warm
        for _ in range(rounds):
            for name, replies in found.items():
                asked = [opened(calm, make, CALM_PER_S, seconds, draw)]
                if name != "alone":
                    asked.append(opened(flood, make, TIMES * FLOOD_LIMIT, seconds, draw))
                mine, *other = await asyncio.gather(*asked)
                replies.extend(mine)
                floods += [reply for each in other for reply in each]
    finally:
        gc.enable()
        await calm.close()
        await flood.close()
    result: dict[str, Any] = {name: figures(replies) for name, replies in found.items()}
    result["flood"] = {
        "limit_per_s": FLOOD_LIMIT,
        "sent": len(floods),
        "statuses": dict(Counter(str(one.status) for one in floods)),
        "refused_p50_ms": ms(percentile([one.took for one in floods if one.status == 429], 0.5)),
    }
    ratio = result["beside a flood"]["ttft_p99_ms"] / result["alone"]["ttft_p99_ms"]
    result["goals"] = {"ttft_p99_against_alone": round(ratio, 2), "goal": GOAL_TTFT}
    return result


def figures(replies: list[Reply]) -> dict[str, Any]:
    ttft = [one.arrivals[0] - one.asked for one in replies if one.arrivals]
    return {
        "answers": len(ttft),
        "not_answered": len(replies) - len(ttft),
        "ttft_p50_ms": ms(percentile(ttft, 0.5)),
        "ttft_p99_ms": ms(percentile(ttft, 0.99)),
    }


# -- whether limits hold


def measure_held(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        redis = RedisServer(folder)
        redis.start()
        stack.callback(redis.stop)
        write(folder / "keys.yaml", {field: Tenant(**{field: most}) for field, most in HELD.items()})
        model, scheduler = str(tiny_qwen2(folder / "model")), str(free_port())
        stack.enter_context(child("--serve-worker", scheduler, "--interval-ms", str(HELD_STEP_MS)))
        ports = [free_port(), free_port()]
        with environment(
            BATON_ROUTER__KEYS_FILE=str(folder / "keys.yaml"), BATON_ROUTER__KEYS_STORE=redis.url
        ):
            for port in ports:  # one after the other: they import for seconds
                stack.enter_context(child("--serve-router", str(port), scheduler, model))
                wait_ready(port)
        return {field: asyncio.run(flooded(ports, field, seconds)) for field in HELD}


async def flooded(ports: list[int], field: str, seconds: float) -> dict[str, Any]:
    """Send ten times what a limit admits, half to each router; return what was admitted of it."""
    clients, draw = [Client(port, field) for port in ports], random.Random(2)
    most = HELD[field]
    make = partial(body, draw, FAKE_MODEL, HELD_TOKENS - ANSWER_TOKENS)
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
        took = max(reply.asked for each in replies for reply in each) - began
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
    """Send `count` requests, a few at a time: the bucket is soon empty, and then the rate is what counts."""
    replies: list[Reply] = []

    async def some() -> None:
        while len(replies) < count:
            replies.append(await client.post("/v1/completions", make()))

    await asyncio.gather(*(some() for _ in range(8)))
    return replies


async def crowded(clients: list[Client], make: Make, most: int, seconds: float) -> dict[str, Any]:
    """Keep ten times as many requests under way as may be; return how many were admitted at a time."""
    under_way = peak = 0
    seen: list[int] = []
    statuses: Counter[str] = Counter()
    until = time.perf_counter() + seconds

    async def loop(client: Client) -> None:
        while time.perf_counter() < until:
            reply = await client.post("/v1/completions", {**make(), "max_tokens": LONG_TOKENS})
            statuses[str(reply.status)] += 1
            if reply.status == 200:
                spans.append((reply.arrivals[0], reply.arrivals[-1]))
            else:
                await asyncio.sleep(0.05)

    spans: list[tuple[float, float]] = []  # of each answer, from its first token to its last
    await asyncio.gather(*(loop(clients[at % len(clients)]) for at in range(TIMES * most)))
    for _, change in sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]):
        under_way += change
        seen.append(under_way)
        peak = max(peak, under_way)
    return {
        "limit": most,
        "sent": sum(statuses.values()),
        "statuses": dict(statuses),
        "peak": peak,
        "usual": percentile(seen, 0.5),
        "off": round(peak / most - 1, 4),
        "goal": GOAL_HELD,
    }


# -- both


async def opened(
    client: Client, make: Make, per_s: float, seconds: float, draw: random.Random
) -> list[Reply]:
    """Send requests at random times, at a rate that nothing slows down."""
    replies: list[Reply] = []

    async def ask() -> None:
        try:
            replies.append(await client.post("/v1/completions", make()))
        except OSError:  # TimeoutError is one
            replies.append(Reply(time.perf_counter()))

    tasks: set[asyncio.Task[None]] = set()
    at, end = time.perf_counter(), time.perf_counter() + seconds
    while (at := at + draw.expovariate(per_s)) < end:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.add(task := asyncio.create_task(ask()))
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return replies


def body(draw: random.Random, model: str, prompt_tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": [draw.randrange(1, 250) for _ in range(prompt_tokens)],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def write(path: Path, tenants: dict[str, Tenant]) -> None:
    """Write a book in which each tenant's key is its name."""
    keys = {name: ApiKey(tenant=name, sha256=digest(name.encode()).hex()) for name in tenants}
    asyncio.run(FileBook(str(path)).edit(lambda _: Book(tenants=tenants, keys=keys)))


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables for the processes that are started inside the block."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
