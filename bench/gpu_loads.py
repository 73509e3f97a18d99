"""Loads on one GPU: streams beside long prompts, and closed loops of so many clients.

The clients of a closed loop are several processes, as one could not read the tokens of hundreds of streams.
What is asked before the first quarter of the time has passed does not count: all clients begin at once.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import aiohttp

from bench.gpu_fleet import Arm, Keep, Served, handoffs
from bench.light import TIMEOUT_S, Client, Reply
from bench.traffic import Mix, run
from harness.checkpoints import QWEN3
from harness.stats import medians, percentile

PROMPT, ANSWER = 256, 64  # tokens of a closed loop's requests
LENGTH = 8192
LONG = LENGTH - 512
SLOTS = 256
CLIENTS = 4  # processes
EACH = 16  # clients of one process at least
WARM_S = 3.0
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, SLOTS]
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}
STOCK = {"long_prefill_token_threshold": 0, "scheduling_policy": "fcfs"}  # vLLM's own order
KV_GIB = {"tiny": 0.5, "1.7": 10.0, "8": 8.0}  # of each worker
STAGING_MIB = 4096
FLEETS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "1P1D": ({"prefill": 1, "decode": 1}, {}),
    "one-stock": ({"mixed": 1}, STOCK),
    "one": ({"mixed": 1}, {}),
}
Figures = dict[str, float]
PROBLEMS = (aiohttp.ClientError, TimeoutError, RuntimeError, OSError)  # of one turn; the others go on


def arms(names: list[str], model: str, size: str, *, compiled: bool, eager: bool) -> dict[str, Arm]:
    """Return these of FLEETS with a model. compiled: as vLLM comes; else with graphs alone."""
    if size not in QWEN3:
        raise ValueError(f"size {size}: one of {', '.join(QWEN3)}")
    kept: dict[str, Any] = {"load_format": "dummy", "enforce_eager": eager}
    if not (compiled or eager):
        kept["compilation_config"] = GRAPHS
    return {
        name: {
            **FLEETS[name][0],
            "engine": {"model": model, "speculative_config": None, "extra": {**kept, **FLEETS[name][1]}},
            "handoff": {"staging_mib": STAGING_MIB},
        }
        for name in names
    }


def engine(size: str) -> dict[str, Any]:
    """Return the section `engine` that all arms have in common."""
    return {
        "dtype": "bfloat16",
        "max_model_len": LENGTH,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 2048,
        "kv_cache_gib": KV_GIB[size],
        "tool_call_parser": None,
    }


def mix(seconds: float) -> Mix:
    """Return the load of streams beside long prompts."""
    return Mix(
        streams=8,
        short_prompt=64,
        short_answer=(128, 256),
        long_prompt=LONG,
        long_answer=16,
        long_per_s=1.0,
        seconds=seconds,
    )


def streams(served: Served, seconds: float, rounds: int, keep: Keep) -> None:
    """Drive the arms in turns with streams beside long prompts. keep: takes what is known after each turn."""
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
            middle = {name: medians(some) for name, some in runs.items() if some}
            keep({"load": asdict(load), "median": middle, "runs": runs, "handoffs": {}})
    after = served.metrics()
    moved = {name: handoffs(before[name], after[name]) for name in served.arms}
    print(moved, flush=True)
    middle = {name: medians(some) for name, some in runs.items() if some}
    keep({"load": asdict(load), "median": middle, "runs": runs, "handoffs": moved})


def closed_loops(served: Served, arms: list[str], clients: list[int], seconds: float, keep: Keep) -> None:
    """Drive the arms with so many clients, in turns. keep: takes what is known, after each turn."""
    found: dict[str, dict[str, Figures]] = {name: {} for name in arms}
    moved: dict[str, dict[str, Any]] = {name: {} for name in arms}
    with ProcessPoolExecutor(CLIENTS, get_context("spawn")) as pool:
        for name in arms:
            closed(pool, served.url, name, min(8, max(clients)), 1.0, seed=0)
        for count in clients:
            for name in arms:
                before = served.metrics()[name]
                try:
                    figures = closed(pool, served.url, name, count, seconds, seed=count)
                except PROBLEMS as problem:
                    print(f"{name:>10} {count} clients: {problem!r}"[:600], flush=True)
                    continue
                found[name][str(count)] = figures
                moved[name][str(count)] = handoffs(before, served.metrics()[name])
                print(f"{name:>10} {count:>4}", figures, moved[name][str(count)], flush=True)
                keep(
                    {"prompt": PROMPT, "answer": ANSWER, "seconds": seconds, "arms": found, "handoffs": moved}
                )


def closed(pool: Executor, url: str, model: str, clients: int, seconds: float, seed: int) -> Figures:
    """Return the figures of a closed loop of so many clients. Raises RuntimeError if no answer was whole."""
    parts = max(1, min(CLIENTS, clients // EACH))
    shares = [clients // parts + (number < clients % parts) for number in range(parts)]
    begin = time.perf_counter() + 0.3  # all processes of a machine have this clock
    port = int(url.rpartition(":")[2])
    jobs = [
        pool.submit(_clients, port, model, share, begin, seconds, seed * CLIENTS + number)
        for number, share in enumerate(shares)
    ]
    replies = [reply for job in jobs for reply in job.result(seconds + 2 * TIMEOUT_S)]
    return figures_of(replies, begin + seconds / 4, begin + seconds)


def _clients(
    port: int, model: str, clients: int, begin: float, seconds: float, seed: int
) -> list[tuple[float, float, bool, list[float]]]:
    gc.collect()
    gc.disable()  # its pauses would look like the server's
    try:
        return asyncio.run(_loops(port, model, clients, begin, seconds, seed))
    finally:
        gc.enable()


async def _loops(
    port: int, model: str, clients: int, begin: float, seconds: float, seed: int
) -> list[tuple[float, float, bool, list[float]]]:
    client, draw, replies = Client(port), random.Random(seed), list[Reply]()

    async def loop() -> None:
        await asyncio.sleep(max(0.0, begin - time.perf_counter()))
        while time.perf_counter() < begin + seconds:
            body = {
                "model": model,
                "prompt": draw.choices(range(100, 4000), k=PROMPT),
                "max_tokens": ANSWER,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            reply = await client.post("/v1/completions", body)
            replies.append(reply)
            if not reply.whole or reply.status != 200:
                await asyncio.sleep(0.2)  # a refusal is not asked again at once

    try:
        await asyncio.gather(*(loop() for _ in range(clients)))
    finally:
        await client.close()
    return [(one.asked, one.done, one.whole and one.status == 200, one.arrivals) for one in replies]


def figures_of(replies: list[tuple[float, float, bool, list[float]]], first: float, last: float) -> Figures:
    """Return what came between two moments: tokens/s, and ms of the requests that were asked then.

    replies: when each was asked and done, whether it was whole, and when its events came. An event carries
    one token or, where several were ready, more. Raises RuntimeError if none was whole.
    """
    whole = [(asked, arrivals) for asked, _, good, arrivals in replies if good and arrivals]
    if not whole:
        raise RuntimeError(f"none of {len(replies)} answers was whole")
    tokens = sum(ANSWER * sum(first <= at < last for at in arrivals) / len(arrivals) for _, arrivals in whole)
    counted = [(asked, arrivals) for asked, arrivals in whole if asked >= first] or whole
    waits = [1e3 * (arrivals[0] - asked) for asked, arrivals in counted]
    gaps = [1e3 * (after - before) for _, arrivals in counted for before, after in pairwise(arrivals)]
    return {
        "tokens_per_s": round(tokens / (last - first), 1),
        "ttft_p50_ms": round(percentile(waits, 0.5), 2),
        "ttft_p99_ms": round(percentile(waits, 0.99), 2),
        "itl_p50_ms": round(percentile(gaps, 0.5), 2),
        "itl_p99_ms": round(percentile(gaps, 0.99), 2),
        "itl_max_ms": round(max(gaps, default=float("nan")), 2),
        "answers": len(counted),
        "failed": len(replies) - len(whole),
    }
