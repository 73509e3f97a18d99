"""Run two loads on one GPU: streams while long prompts arrive, and closed loops of clients.

Closed-loop clients send their next request as soon as an answer is complete. They run in several processes:
a single one could not read the tokens of hundreds of streams. Requests of the first quarter do not count,
because all clients start at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.pool import Pool
from multiprocessing.synchronize import Barrier
from typing import Any

import aiohttp

from bench.gpu_fleet import Arm, Keep, Served, handoffs, stages
from bench.light import TIMEOUT_S, Client, Reply, body, latencies
from bench.served import AGGREGATED, no_pauses
from bench.traffic import Mix, run
from harness.stats import medians

LENGTH = 8192
LONG = LENGTH - 512
SLOTS = 256
WARM_S = 3.0
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, SLOTS]
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}
COMPILED = {"cudagraph_capture_sizes": [*CAPTURED, 512]}  # vLLM's default captures about fifty sizes
KV_GIB = {"tiny": 0.5, "1.7": 10.0, "8": 8.0}  # per worker
STAGING_MIB = 4096
FLEETS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "1P1D": ({"prefill": 1, "decode": 1}, {}),
    "one-stock": ({"mixed": 1}, AGGREGATED["extra"]),
    "one": ({"mixed": 1}, {}),
}
PROMPT, ANSWER = 256, 64  # tokens of a request
CLIENTS = 4  # processes
EACH = 16  # minimum number of clients per process
READY_S = 60.0  # time for the processes to import this module
SOON_S = 0.2  # time for them to receive their job
SLACK_S = 10.0  # time for them to send their figures
Figures = dict[str, float]
# Errors that end only one turn.
PROBLEMS = (aiohttp.ClientError, RuntimeError, OSError, multiprocessing.TimeoutError)


def arms(names: list[str], model: str, *, compiled: bool, eager: bool) -> dict[str, Arm]:
    """Return these FLEETS with a model: with torch.compile, with CUDA graphs only, or eager."""
    kept: dict[str, Any] = {"load_format": "dummy", "enforce_eager": eager}
    if not eager:
        kept["compilation_config"] = COMPILED if compiled else GRAPHS
    return {
        name: {
            "workers": FLEETS[name][0],
            "engine": {"model": model, "speculative_config": None, "extra": {**kept, **FLEETS[name][1]}},
            "handoff": {"staging_mib": STAGING_MIB},
        }
        for name in names
    }


def engine(size: str) -> dict[str, Any]:
    """Return the `engine` section that all arms share."""
    return {
        "dtype": "bfloat16",
        "max_model_len": LENGTH,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 2048,
        "kv_cache_gib": KV_GIB[size],
        "tool_call_parser": None,
    }


def mix(seconds: float) -> Mix:
    return Mix(
        streams=8,
        short_prompt=64,
        short_answer=(128, 256),
        long_prompt=LONG,
        long_answer=16,
        long_per_s=1.0,
        seconds=seconds,
    )


def middle(runs: dict[str, list[Figures]]) -> dict[str, Figures]:
    return {name: medians(some) for name, some in runs.items() if some}


def streams(served: Served, seconds: float, rounds: int, keep: Keep) -> None:
    """Alternate streams with long prompts between the arms. `keep` gets the figures after each turn."""
    load, runs = mix(seconds), {name: list[Figures]() for name in served.arms}
    for name in served.arms:  # the first requests compile and allocate
        asyncio.run(run(mix(WARM_S), served.url, name, seed=0))
    before = served.metrics()
    for number in range(rounds):
        for name in served.arms:
            try:
                found = asyncio.run(run(load, served.url, name, seed=number + 1))
            except PROBLEMS as problem:
                print(f"{name:>10} {problem!r}"[:600], flush=True)
                continue
            runs[name].append(found)
            print(f"{name:>10}", {key: round(value, 1) for key, value in found.items()}, flush=True)
            keep({"load": asdict(load), "median": middle(runs), "runs": runs, "handoffs": {}})
    after = served.metrics()
    moved = {name: handoffs(before[name], after[name]) for name in served.arms}
    print(moved, flush=True)
    keep({"load": asdict(load), "median": middle(runs), "runs": runs, "handoffs": moved})


def closed_loops(served: Served, arms: list[str], clients: list[int], seconds: float, keep: Keep) -> None:
    """Run each number of clients on each arm. `keep` gets the figures after each turn."""
    found: dict[str, dict[str, Figures]] = {name: {} for name in arms}
    took: dict[str, dict[str, Any]] = {name: {} for name in arms}  # ms of handoffs by stage
    with client_processes() as pool:
        for name in arms:
            _warmed(pool, served.url, name, max(clients))
        for count in clients:
            for name in arms:
                before = served.stages()
                try:
                    figures = closed(pool, served.url, name, count, seconds, seed=count)
                except PROBLEMS as problem:
                    print(f"{name:>10} {count} clients: {problem!r}"[:600], flush=True)
                    continue
                found[name][str(count)] = figures
                took[name][str(count)] = stages(before, served.stages())
                print(f"{name:>10} {count:>4}", figures, took[name][str(count)], flush=True)
                told = {"arms": found, "handoff_ms": took}
                keep({"prompt": PROMPT, "answer": ANSWER, "seconds": seconds, **told})


def _warmed(pool: Pool, url: str, name: str, clients: int) -> None:
    """Send the first requests, which compile and allocate. Errors are printed: they recur in the figures."""
    try:
        closed(pool, url, name, clients, WARM_S / 2, seed=0)
    except PROBLEMS as problem:
        print(f"{name:>10} {clients} clients, first: {problem!r}"[:600], flush=True)


@contextmanager
def client_processes() -> Iterator[Pool]:
    """Start the client processes and wait until all are ready."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(CLIENTS + 1)
    with context.Pool(CLIENTS, _ready, (ready,)) as pool:
        _ready(ready)
        yield pool


def _ready(all_ready: Barrier) -> None:
    """Wait for the other processes. A new process imports this module to run it."""
    all_ready.wait(READY_S)


def closed(pool: Pool, url: str, model: str, clients: int, seconds: float, seed: int) -> Figures:
    """Run one closed loop and return its figures. Raises RuntimeError if no answer was complete."""
    parts = max(1, min(CLIENTS, clients // EACH))
    shares = [clients // parts + (number < clients % parts) for number in range(parts)]
    begin = time.perf_counter() + SOON_S  # all processes of a machine share this clock
    port = int(url.rpartition(":")[2])
    jobs = [
        (port, model, share, begin, seconds, seed * CLIENTS + number) for number, share in enumerate(shares)
    ]
    found = pool.starmap_async(_clients, jobs, chunksize=1).get(seconds + TIMEOUT_S + SLACK_S)
    return figures_of([reply for replies in found for reply in replies], begin + seconds / 4, begin + seconds)


def _clients(port: int, model: str, clients: int, begin: float, seconds: float, seed: int) -> list[Reply]:
    with no_pauses():
        return asyncio.run(_loops(port, model, clients, begin, begin + seconds, seed))


async def _loops(port: int, model: str, clients: int, begin: float, end: float, seed: int) -> list[Reply]:
    client, draw, replies = Client(port), random.Random(seed), list[Reply]()

    async def loop() -> None:
        await asyncio.sleep(max(0.0, begin - time.perf_counter()))
        while time.perf_counter() < end:
            asked = time.perf_counter()
            try:
                reply = await client.post("/v1/completions", body(draw, PROMPT, ANSWER, model=model))
            except OSError:  # includes TimeoutError
                reply = Reply(asked)
            replies.append(reply)
            if not reply.whole or reply.status != 200:
                await asyncio.sleep(0.2)  # do not flood a server that refuses

    try:
        await asyncio.gather(*(loop() for _ in range(clients)))
    finally:
        await client.close()
    return replies


def figures_of(replies: list[Reply], first: float, last: float) -> Figures:
    """Return tokens/s between two times, and latencies of the requests that were sent after the first.

    An event may carry several tokens. Raises RuntimeError if no answer was complete.
    """
    whole = [one for one in replies if one.whole and one.status == 200 and one.arrivals]
    if not whole:
        raise RuntimeError(f"none of {len(replies)} answers was complete")
    in_time = (sum(first <= at < last for at in one.arrivals) / len(one.arrivals) for one in whole)
    counted = [one for one in whole if one.asked >= first] or whole
    return {
        "tokens_per_s": round(ANSWER * sum(in_time) / (last - first), 1),
        **latencies(counted),
        "failed": len(replies) - len(whole),
    }
