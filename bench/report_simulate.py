"""The sections of docs/benchmarks.md that come from the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench.report_sections import Block, Result, many, measured, table

_COLUMNS = {
    "requests": ("requests", ",.0f"),
    "ttft_mean_ms": ("TTFT mean, ms", ",.0f"),
    "ttft_p50_ms": ("p50", ",.0f"),
    "ttft_p99_ms": ("p99", ",.0f"),
    "itl_p99_ms": ("ITL p99, ms", ".1f"),
    "computed_share": ("computed share", ".3f"),
    "within_goals": ("within goals", ".1%"),
    "goodput_per_s": ("goodput/s", ",.1f"),
    "busy_prefill": ("prefill busy", ".0%"),
    "busiest_prefill": ("the busiest", ".0%"),
}
_PACE = {"simulated": ("simulated", ",.0f"), "simulated_per_s": ("a second of wall time", ",.0f")}


def policies(result: Result) -> list[Block]:
    return [
        f"## Placement policies, simulated at {result['split']}\n",
        "The product's scheduler and the router's rules on virtual time ([simulator](simulator.md)), with workers of an assumed "
        "pace: 8,000 prompt tokens a second, steps of 12 to 50 ms. Each policy gets the same requests. `random`, `round robin` and "
        "`least loaded` (fewest queued tokens, fewest requests, of all) hear nothing of caches; `longest prefix` takes the worker "
        f"that holds most, whatever its queue. {_scope(result)}",
        _measured(result),
        *_tables(result, _COLUMNS),
    ]


def size(result: Result) -> list[Block]:
    return [
        f"## The simulator at {result['split']}\n",
        f"Chats, as above, on {_workers(result['split']):,} workers. {_scope(result)}",
        _measured(result),
        *_tables(
            result,
            {key: _COLUMNS[key] for key in ("ttft_p50_ms", "ttft_p99_ms", "computed_share", "within_goals")}
            | _PACE,
        ),
    ]


def weights(result: Result) -> list[Block]:
    return [
        "## Weights of the scores, simulated\n",
        f"The default policy, and the same with one weight changed, one scorer left out or put in, at {result['split']}. "
        f"{_scope(result)}",
        _measured(result),
        *_tables(result, {key: _COLUMNS[key] for key in _SHORT}),
    ]


_SHORT = ("ttft_mean_ms", "ttft_p99_ms", "itl_p99_ms", "computed_share", "within_goals")


def validation(result: Result) -> list[Block]:
    keys = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "computed_tokens", "computed_share", "requests")
    rows = [
        [
            arm,
            key,
            *(_plain(one[which][key]) for which in ("real", "simulated")),
            f"{one['error_percent'][key]:+.1f} %",
        ]
        for arm, one in result["arms"].items()
        for key in keys
    ]
    return [
        "## The simulator against reality\n",
        "Multi-turn chats on a real 2P2D on this machine, and the same conversations simulated with a profile that was measured on "
        f"one worker before ({result['profile']}): {result['rate']:g} requests a second for {result['seconds']:g} s.",
        measured(result, "python -m bench simulate --validate --save"),
        table(["policy", "figure", "real", "simulated", "error"], rows),
    ]


def _measured(result: Result) -> str:
    return measured(result, "python -m bench simulate --save")


def _scope(result: Result) -> str:
    goals = result["goals"]
    return (
        f"{result['seconds']:g} s of arrivals, of which the first fifth does not count; {many(result['seeds'], 'trace')} of each kind. "
        f"Goals: TTFT {goals['ttft_s']:g} s, mean ITL {goals['itl_s']:g} s."
    )


def _tables(result: Result, columns: dict[str, tuple[str, str]]) -> Iterable[str]:
    for kind, arms in result["loads"].items():
        rows = [
            [arm, *(format(figures[key], shape) for key, (_, shape) in columns.items())]
            for arm, figures in arms.items()
        ]
        yield f"{kind}:\n"
        yield table(["policy", *(head for head, _ in columns.values())], rows)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3f}"


def _workers(split: str) -> int:
    prefill, _, decode = split.removesuffix("D").partition("P")
    return int(prefill) + int(decode)


# By the name of the result's file, in the order of the page.
SECTIONS: dict[str, Callable[[Result], list[Block]]] = {
    "simulate": policies,
    "simulate-size": size,
    "simulate-weights": weights,
    "simulate-validation": validation,
}
