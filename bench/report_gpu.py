"""The section of docs/benchmarks.md on several workers that share one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.report_sections import HEADS, Block, Result, table

STREAMS = {
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99, ms",
    "itl_max_ms": "longest gap, ms",
    "ttft_short_p50_ms": "TTFT short p50, ms",
    "ttft_short_p99_ms": "TTFT short p99, ms",
    "ttft_long_p50_ms": "TTFT long p50, ms",
    "ttft_long_p99_ms": "TTFT long p99, ms",
    "tokens_per_s": "tokens/s",
}
LOAD = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "failed")
KIND = {
    "streams": "graphs of decode steps, no compiler",
    "compiled": "torch.compile and graphs of steps, as vLLM comes",
}


def gpu_serve(result: Result) -> list[Block]:
    """Return the section: what there is of answers, streams and load."""
    blocks: list[Block] = [
        "## Several workers on one GPU\n",
        "Workers of `baton up` share a GPU (`fleet.devices`), each a process of its own; what ran, and what did not: "
        "[On GPUs](gpu.md). `1P1D` is a prefill and a decode worker, `one` a mixed worker in Baton's order, `one-stock` one in "
        "vLLM's own. Processes on one GPU take turns, so that a decode worker's step waits for slices of a prefill's.\n",
    ]
    if "answers" in result:
        blocks += _answers(result["answers"])
    for part in ("streams", "compiled"):
        for size, found in result.get(part, {}).items():
            blocks += _streams(found, size, KIND[part])
    for size, found in result.get("load", {}).items():
        blocks += _load(found, size)
    for name, failure in result.get("failures", {}).items():
        blocks.append(f"Failed: {name}, `{failure['taken']['command']}`, {failure['taken']['when']}.\n")
    return blocks


def _taken(found: dict[str, Any]) -> str:
    taken = found["taken"]
    card = f"; {taken['gpu']}, driver {taken['driver']}" if "gpu" in taken else ""
    failed = f" Could not start: {', '.join(found['failed'])}." if found["failed"] else ""
    return f"`{taken['command']}`{card}, {taken['when']}.{failed}\n"


def _answers(found: dict[str, Any]) -> list[Block]:
    rows = []
    for name, arm in found["arms"].items():
        moved = arm.get("handoffs", {})
        drafted = f"{arm['drafted']}, {arm['accepted']}" if "drafted" in arm else ""
        stages = [moved.get(f"{stage}_ms", "") for stage in ("save", "move", "total")]
        rows.append([name, f"{arm['equal']} of {arm['of']}", _places(arm["differences"]), *stages, drafted])
    head = ["", "equal", "first differences", "save, ms", "move, ms", "total, ms", "drafted, accepted"]
    return [
        f"Greedy answers of {found['tokens']} tokens in bfloat16, of the demo model, against those of `{found['reference']}`. "
        "For each first difference: its position, and the gap between the reference's two best tokens there "
        "(log-probabilities). Stages are means of a worker's handoffs, one at a time; the total is from the end of the save "
        "to the request in the batch.",
        _taken(found),
        table(head, rows),
    ]


def _places(differences: list[dict[str, Any]]) -> str:
    return ", ".join(f"{one['at']} ({one['lead']})" for one in differences)


def _streams(found: dict[str, Any], size: str, kind: str) -> list[Block]:
    load = found["load"]
    rows = [[name, *(f"{arm[key]:.1f}" for key in STREAMS)] for name, arm in found["median"].items()]
    return [
        f"{load['streams']} streams of {load['short_answer'][0]} to {load['short_answer'][1]} tokens beside prompts of "
        f"{load['long_prompt']} tokens at {load['long_per_s']:g}/s; the shape of {size}B, random weights; {kind}.",
        _taken(found),
        table(["", *STREAMS.values()], rows),
    ]


def _load(found: dict[str, Any], size: str) -> list[Block]:
    rows = [
        [clients, name, *(f"{figures[key]:.1f}" if key != "failed" else figures[key] for key in LOAD)]
        for name, arm in found["arms"].items()
        for clients, figures in arm.items()
    ]
    rows.sort(key=lambda row: int(row[0]))
    return [
        f"Closed loops of so many clients: prompts of {found['prompt']} tokens, answers of {found['answer']}; the shape of {size}B.",
        _taken(found),
        table(["clients", "", *(HEADS.get(key, key) for key in LOAD)], rows),
    ]


# By the name of the result's file.
SECTIONS: dict[str, Callable[[Result], list[Block]]] = {"gpu-serve": gpu_serve}
