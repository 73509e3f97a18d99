"""Loads on one GPU: streams beside long prompts, and closed loops of so many clients."""

from __future__ import annotations

import asyncio
import multiprocessing
from dataclasses import asdict
from multiprocessing.pool import Pool
from typing import Any

import aiohttp

from bench.gpu_clients import ANSWER, PROMPT, client_processes, closed
from bench.gpu_fleet import Arm, Keep, Served, handoffs, stages
from bench.traffic import Mix, run
from harness.stats import medians

LENGTH = 8192
LONG = LENGTH - 512
SLOTS = 256
WARM_S = 3.0
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, SLOTS]
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED}
COMPILED = {"cudagraph_capture_sizes": [*CAPTURED, 512]}  # vLLM's own has some fifty sizes
STOCK = {"long_prefill_token_threshold": 0, "scheduling_policy": "fcfs"}  # vLLM's own order
KV_GIB = {"tiny": 0.5, "1.7": 10.0, "8": 8.0}  # of each worker
STAGING_MIB = 4096
FLEETS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "1P1D": ({"prefill": 1, "decode": 1}, {}),
    "one-stock": ({"mixed": 1}, STOCK),
    "one": ({"mixed": 1}, {}),
}
Figures = dict[str, float]
# Errors of one turn; the others go on.
PROBLEMS = (aiohttp.ClientError, RuntimeError, OSError, multiprocessing.TimeoutError)


def arms(names: list[str], model: str, *, compiled: bool, eager: bool) -> dict[str, Arm]:
    """Return these FLEETS with a model: compiled by torch.compile, with graphs alone, or eager."""
    kept: dict[str, Any] = {"load_format": "dummy", "enforce_eager": eager}
    if not eager:
        kept["compilation_config"] = COMPILED if compiled else GRAPHS
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


def middle(runs: dict[str, list[Figures]]) -> dict[str, Figures]:
    """Return the medians of the arms that have runs."""
    return {name: medians(some) for name, some in runs.items() if some}


def streams(served: Served, seconds: float, rounds: int, keep: Keep) -> None:
    """Drive the arms in turns with streams beside long prompts; `keep` gets the figures after each turn."""
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
    """Drive the arms with so many clients, in turns; `keep` gets the figures after each turn."""
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
    """Have the first requests compile and allocate; a problem there shows in the figures, too."""
    try:
        closed(pool, url, name, clients, WARM_S / 2, seed=0)
    except PROBLEMS as problem:
        print(f"{name:>10} {clients} clients, first: {problem!r}"[:600], flush=True)
