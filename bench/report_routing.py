"""The section of docs/benchmarks.md about placement policies under multi-turn chats."""

from __future__ import annotations

from collections.abc import Callable

from bench.report_sections import Block, Result, many, measured, table

_REAL = {
    "ttft_p50_ms": ("TTFT p50, ms", ",.0f"),
    "ttft_p99_ms": ("p99", ",.0f"),
    "itl_p50_ms": ("ITL p50, ms", ".1f"),
    "itl_p99_ms": ("p99", ".0f"),
    "computed_tokens": ("prompt tokens computed", ",.0f"),
    "computed_share": ("of all", ".0%"),
    "tokens_per_s": ("tokens/s", ",.0f"),
}
_SIMULATED = {
    "requests": ("requests", ",.0f"),
    "ttft_p50_ms": ("TTFT p50, ms", ",.0f"),
    "ttft_p99_ms": ("p99", ",.0f"),
    "itl_p50_ms": ("ITL p50, ms", ".1f"),
    "itl_p99_ms": ("p99", ".1f"),
    "computed_share": ("computed share", ".0%"),
    "requests_per_s": ("requests/s", ",.1f"),
}


def routing(result: Result) -> list[Block]:
    load, pairs = result["load"], result["pairs"]
    rounds = len(next(iter(result["runs"].values())))
    requests = load["users"] * load["chats"] * load["turns"]
    longest = load["system"] + load["turns"] * (load["message"] + load["answer"])
    blocks: list[Block] = [
        "## Placement of multi-turn chats\n",
        f"Baton's {pairs}P{pairs}D by policy, and {2 * pairs} vLLM servers behind vllm-router, on the same cores, each engine with a "
        f"KV cache of {result['cache_tokens']:,} tokens, without drafts, in float32. {load['users']} users have {load['chats']} "
        f"chats each of {load['turns']} turns behind one of {load['systems']} system prompts of {load['system']} tokens; a turn "
        f"adds {load['message']} and {load['answer']} of the answer, {longest:,} in the end, with {load['think_s']:g} s (mean) "
        f"before each message: {requests} requests, the same in each arm; all Baton's answers were equal. `round robin` and "
        "`least loaded` (fewest queued tokens, fewest requests, of all) hear nothing of caches; `default` is Baton as it comes. "
        f"`cache_aware`, vllm-router's default, remembers what it has sent where; its `kv_aware` (0.1.17) credited no prompt with "
        f"a cached token here, though the servers tell their KV events, so that it is left out. {many(rounds, 'round')} in turns.",
        measured(result, "python -m bench routing"),
        _table(result["median"], _REAL),
    ]
    if simulation := result.get("simulation"):
        blocks += [
            f"The simulator's {simulation['split']} with its own multi-turn chats, {simulation['requests_per_s']:g} requests a "
            f"second for {simulation['seconds']:g} s, of which the first fifth does not count (`Baton` is `default`):\n",
            _table(simulation["policies"], _SIMULATED),
        ]
    return blocks


def _table(arms: dict[str, dict[str, float]], columns: dict[str, tuple[str, str]]) -> str:
    rows = [
        [arm, *(format(figures[key], shape) for key, (_, shape) in columns.items())]
        for arm, figures in arms.items()
    ]
    return table(["policy", *(head for head, _ in columns.values())], rows)


# By the name of the result's file.
SECTIONS: dict[str, Callable[[Result], list[Block]]] = {"routing": routing}
