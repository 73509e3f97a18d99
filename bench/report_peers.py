"""The section of docs/benchmarks.md that sets Baton's 1P1D beside vLLM's own."""

from __future__ import annotations

from collections.abc import Callable

from bench.report_sections import Block, Result, measured, table

ROWS = (
    ("one long prompt alone: time to first token, p50, ms", "alone_ttft_p50_ms"),
    ("its second token after the first, p50, ms", "alone_second_p50_ms"),
    ("its answer of 8 tokens, p50, ms", "alone_total_p50_ms"),
    ("the same, p95, ms", "alone_total_p95_ms"),
    ("CPU time of it, s", "alone_cpu_s"),
    ("cores in use while nothing is asked", "idle_cores"),
    ("long prompts beside streams: gap between a stream's tokens, p50, ms", "itl_p50_ms"),
    ("gap, p99, ms", "itl_p99_ms"),
    ("longest gap, ms", "itl_max_ms"),
    ("time to first token, short prompt, p50, ms", "ttft_short_p50_ms"),
    ("time to first token, long prompt, p50, ms", "ttft_long_p50_ms"),
    ("output tokens/s in all", "tokens_per_s"),
    ("CPU time of a token, ms", "cpu_ms_a_token"),
)


def peers(result: Result) -> list[Block]:
    load, arms, turns = result["load"], result["median"], result["turns"]
    short = {name: len(runs) for name, runs in result["runs"].items() if len(runs) < turns}
    rows = [
        [what, *(f"{arm[key]:.3g}" if arm[key] < 100 else f"{arm[key]:.0f}" for arm in arms.values())]
        for what, key in ROWS
    ]
    return [
        "## Beside vLLM's own prefill and decode\n",
        "1P1D of Baton against two vLLM servers with `NixlConnector` and vllm-router, an engine a core each, without drafts. "
        "NIXL's progress thread spins on a core in each of vLLM's engines. With it off (vLLM has no setting for it) no request was "
        "answered when that was tried: the prefill server's worker hung. "
        f"Long prompts have {load['long_prompt']} tokens; the mixed load is that of the section on long prompts beside running "
        f"streams, {turns} turns of {load['seconds']:.0f} s each, each in a deployment started anew.",
        *(
            f"{name}: {came} of {turns} turns came through; in the others a request was not answered as it should be."
            for name, came in short.items()
        ),
        measured(result, "python -m bench peers"),
        table(["", *arms], rows),
    ]


# By the name of the result's file.
SECTIONS: dict[str, Callable[[Result], list[Block]]] = {"peers": peers}
