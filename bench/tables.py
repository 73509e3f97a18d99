"""Define the tables of docs/benchmarks.md and other pages: their results files, figures and column heads.

`;` separates columns. A column is a key of the figures, or several joined by dots. `=` gives it a head other
than the key's words, `|` a format; without one a number has at most three significant digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]
_UNITS = {"_per_s": "/s", "_a_s": "/s", "_ms": ", ms", "_us": ", µs", "_s": ", s", "_mib": ", MiB"}


@dataclass(frozen=True)
class Table:
    """A table: `view` returns nested figures, and each level of nesting becomes a column of labels."""

    file: str  # its name in bench/results
    view: str | Callable[[Result], Any]  # a path in the file, or a function of it
    columns: str
    labels: tuple[str, ...] = ()  # heads of the label columns
    turned: bool = False  # transposed
    part: str = ""  # the part of a file whose parts have their own commands

    def cells(self) -> Iterator[tuple[str, str, str]]:
        """Yield each column's key, head and format."""
        for column in self.columns.split(";"):
            named, _, shape = column.strip().partition("|")
            key, _, head = named.partition("=")
            yield key, head or _head(key), shape


def _head(key: str) -> str:
    unit = next((unit for unit in _UNITS if key.endswith(unit)), "")
    words = key.removesuffix(unit).replace("_", " ")
    return re.sub(r"\b(ttft|itl|cpu)\b", lambda found: found[0].upper(), words) + _UNITS.get(unit, "")


def _swapped(nested: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Swap the outer two levels."""
    inner = {key: None for each in nested.values() for key in each}
    return {key: {outer: each.get(key, {}) for outer, each in nested.items()} for key in inner}


def _ratio(result: Result) -> Any:
    ours, theirs = result["median"]["1P1D"], result["median"]["2 aggregated"]
    return result["median"] | {"ratio": {key: ours[key] / theirs[key] for key in ours if theirs[key]}}


def _served(result: Result) -> Any:
    """Return each method's speed-up over decoding without drafts."""

    def faster(loads: dict[str, dict[str, float]], method: str) -> dict[str, float]:
        return {streams: row["none"] / row[method] for streams, row in loads.items()}

    return {
        placement: {
            method: {kind: faster(loads, method) for kind, loads in kinds.items()}
            for method, kinds in methods.items()
        }
        for placement, methods in result["served"].items()
    }


def _classes(result: Result) -> Any:
    return {
        shape: {
            arm: one["interactive"].get(arm, {}) | {"batch": one["batch_tokens_per_s"].get(arm)}
            for arm in dict.fromkeys([*one["interactive"], *one["batch_tokens_per_s"]])
        }
        for shape, one in result["deployments"].items()
    }


def _class_goals(result: Result) -> Any:
    return {
        shape: {"left": one["left"]}
        | {goal.partition(" (")[0]: value for goal, value in one["goals"].items()}
        for shape, one in result["deployments"].items()
    }


def _overload(result: Result) -> Any:
    after = result["after"]
    return {
        "one stream alone": result["alone"],
        "a full house": result["full"],
        "overload": result["overload"],
        "one stream afterwards": after["alone"],
        "a full house afterwards": after["full"],
    }


def _gpu(part: str, figures: str) -> Callable[[Result], Any]:
    return lambda result: {f"{size}B": found[figures] for size, found in result.get(part, {}).items()}


def _equal(cell: dict[str, Any]) -> str:
    return f"{cell['equal']}/{cell['of']}"


def per_draft(cell: dict[str, Any]) -> float:
    return float(cell["accepted"] / cell["drafts"]) if cell["drafts"] else 0.0


def _shapes(result: Result) -> Any:
    """Return each shape's models with accepted tokens per draft, and the sides with other answers."""
    found: dict[str, list[str]] = {}
    for name, cells in result["cases"].items():
        model, _, shape = name.rpartition(", ")
        drafts = f": {per_draft(cells['decode']):.2f}" if cells["decode"]["drafts"] else ""
        wrong = [
            f" ({side}: {_equal(cell)} answers)" for side, cell in cells.items() if cell["equal"] < cell["of"]
        ]
        found.setdefault(shape, []).append("".join([model, drafts, *wrong]))
    return {shape: {"models": "; ".join(models)} for shape, models in found.items()}


def _drafted(cell: dict[str, Any]) -> str:
    """Return the accepted tokens of a draft, and what is wrong with the answers or the start."""
    if "why" in cell:
        return f"no: {cell['why']}"
    ties = f" ({cell['near_ties']} by a near-tie)" if cell["near_ties"] else ""
    wrong = f" ({_equal(cell)} equal{ties})" if cell["equal"] < cell["of"] else ""
    return f"{per_draft(cell):.2f}{wrong}"


def _withheld(result: Result) -> Any:
    return {
        name: {"whole": per_draft(cell), "withheld": per_draft(cell["withheld"])}
        for name, cell in ((name, row["cells"]["1P1D"]) for name, row in result["rows"].items())
        if "withheld" in cell
    }


def _by_trace(*traces: str) -> str:
    return ";".join(
        f"{one}.ttft_mean_ms={one}: TTFT, ms; {one}.within_goals={one}: good|.1%" for one in traces
    )


_LATENCIES = "ttft_p50_ms; ttft_p99_ms; itl_p50_ms; itl_p99_ms"
_MIX = (
    "itl_p50_ms=gap between a stream's tokens, p50, ms; itl_p99_ms=gap, p99, ms; itl_max_ms=longest gap, ms;"
    "ttft_short_p50_ms=TTFT of short prompts, p50, ms; ttft_long_p50_ms=TTFT of long prompts, p50, ms;"
    "tokens_per_s=output tokens/s"
)
_STREAMS = (
    "itl_p50_ms; itl_p99_ms; itl_max_ms=longest gap, ms; ttft_short_p50_ms; ttft_long_p50_ms; tokens_per_s"
)
_ROUTER = "tokens_per_s; router_cpu_us_per_token=CPU per token, µs; tokens_per_event; router_rss_mib=RSS, MiB"
_SERVERS = "concurrent requests", "server"
IMAGE_FAMILIES = {
    "qwen2.5-vl": "Qwen2.5-VL: positions depend on images (M-RoPE)",
    "qwen3-vl": "Qwen3-VL: DeepStack",
    "qwen3.5-vision": "Qwen3.5: states (`--no-enable-prefix-caching`, as [without images](handoff-wire.md))",
    "gemma3-vision": "Gemma 3: sliding windows",
    "llava": "LLaVA",
    "smolvlm": "SmolVLM: images are cut into tiles",
}

TABLES = {
    "disaggregation": Table("disaggregation", _ratio, _MIX, turned=True),
    "clients": Table("clients", "median", f"failed; tokens_per_s; {_LATENCIES}", _SERVERS),
    "speculation": Table(
        "speculation",
        _served,
        ";".join(
            f"{kind}.{streams}={kind}, {streams} at a time|.2f"
            for kind in ("chat", "repetitive")
            for streams in (1, 4, 16)
        ),
        ("", "method"),
    ),
    "fair-share": Table(
        "fair-share",
        "models.qwen2-80m",
        "short_p50_ms; short_p99_ms; long_p50_ms; flood_tokens_per_s=flood, tokens/s",
    ),
    "path": Table(
        "path", "median_ms", "save; sample; wait; move; check; load; total; total_p95", ("transport",)
    ),
    "handoff": Table(
        "handoff",
        lambda result: _swapped(result["tokens"]),
        ";".join(
            ["900.MB=MB of 900 tokens", *(f"{many}.total_ms={many} tokens, ms" for many in (100, 900, 3600))]
        ),
        ("transport, format",),
    ),
    "router": Table(
        "router",
        lambda result: {f"{one['interval_ms']:g} ms": one for one in result["runs"]},
        _ROUTER,
        ("step",),
    ),
    "router-processes": Table(
        "router-processes",
        lambda result: {f"{one['processes']}, flush_ms {one['flush_ms']:g}": one for one in result["arms"]},
        f"{_ROUTER}; tokens_per_s_a_core=tokens/s per core",
        ("processes",),
    ),
    "scheduler": Table(
        "scheduler",
        "arms.here",
        "placed_per_s; failed; place_p50_ms; place_p99_ms=p99; own_p50_ms; own_p99_ms=p99; cpu_us;"
        "redis_us=Redis, µs; fast_placed_per_s=fast: placed/s; fast_cpu_us=fast: CPU, µs",
        ("deployment",),
    ),
    "overload": Table(
        "overload",
        _overload,
        "itl_p50_ms=gap p50, ms; itl_p99_ms=gap p99, ms; itl_max_ms=longest gap, ms; ttft_p50_ms; answers",
    ),
    "overload-refused": Table(
        "overload",
        lambda result: {"overload": result["overload"] | result["load"] | result["goals"] | result["after"]},
        "capacity_per_s=capacity, answers/s; offered_per_s; admitted_share=admitted|.0%;"
        "refused=refused with 503; refused_p50_ms=time of a refusal p50, ms; refused_p99_ms=p99;"
        "without_retry_after=without Retry-After; broken=broken streams; blocks_missing=KV blocks missing;"
        "itl_p99_against_alone=gap p99 against one stream; itl_p99_against_full=gap p99 against a full house",
        turned=True,
    ),
    "classes": Table(
        "classes", _classes, f"{_LATENCIES}; batch=batch tokens/s", ("", "interactive requests")
    ),
    "classes-goals": Table(
        "classes",
        _class_goals,
        "ttft_p50_ms=TTFT p50; ttft_p99_ms=TTFT p99; itl_p50_ms=ITL p50; itl_p99_ms=ITL p99;"
        "left=share left for batch; batch of what is left=batch, relative to that",
    ),
    "prefixes": Table(
        "prefixes",
        "turns",
        "place_p50_ms=turn p50, ms; place_p99_ms=p99; requests_a_core_s=turns/s per core",
        ("workers",),
    ),
    "simulate": Table(
        "simulate",
        lambda result: _swapped(result["loads"]),
        _by_trace("chats", "shared", "agents", "documents", "prompts"),
        ("policy",),
    ),
    "simulate-size": Table(
        "simulate-size",
        "loads",
        "ttft_mean_ms; ttft_p99_ms; computed_share; within_goals=good|.1%; simulated=requests;"
        "simulated_per_s=per second of wall time",
        ("trace", "policy"),
    ),
    "simulate-validation": Table(
        "simulate-validation",
        "arms",
        "real.ttft_mean_ms=TTFT mean, real, ms; simulated.ttft_mean_ms=simulated, ms;"
        "error_percent.ttft_mean_ms=error, %: TTFT mean|+.1f; error_percent.ttft_p50_ms=p50|+.1f;"
        "error_percent.ttft_p90_ms=p90|+.1f; error_percent.computed_tokens=computed tokens|+.1f",
        ("policy",),
    ),
    "peers": Table(
        "peers",
        "median",
        "alone_ttft_p50_ms=one long prompt alone: TTFT p50, ms;"
        "alone_second_p50_ms=its second token after the first, p50, ms;"
        "alone_total_p50_ms=its answer of 8 tokens, p50, ms; alone_cpu_s=its CPU time, s;"
        f"idle_cores=cores in use while idle; {_MIX}; cpu_ms_a_token=CPU time per token, ms",
        turned=True,
    ),
    "images": Table(
        "images",
        lambda result: {
            IMAGE_FAMILIES[name]: {one.replace(",", " +"): _equal(cell) for one, cell in cells.items()}
            for name, cells in result["families"].items()
        },
        "mixed; 1P1D=1P1D; 2P2D=2P2D; 1E1P1D=1E1P1D; 1E1P1D + drafts=1E1P1D, drafts",
        ("family",),
    ),
    "shapes": Table("shapes", _shapes, "models=models: accepted tokens per draft", ("shape",)),
    "speculation-table": Table(
        "speculation-table",
        lambda result: {
            name: {fleet: _drafted(cell) for fleet, cell in row["cells"].items()}
            for name, row in result["rows"].items()
        },
        "aggregated; 1P1D; 2P2D",
        ("method, architecture",),
    ),
    "speculation-withheld": Table(
        "speculation-table",
        _withheld,
        "whole=accepted tokens per draft|.2f; withheld=without the drafter's KV|.2f",
        ("1P1D",),
    ),
    "images-streams": Table(
        "images-beside",
        "streams",
        "itl_p50_ms=gap between a stream's tokens, p50, ms; itl_p99_ms=gap, p99, ms;"
        "itl_max_ms=longest gap, ms; ttft_short_p50_ms=TTFT of text, p50, ms;"
        "ttft_short_p99_ms=TTFT of text, p99, ms;"
        "ttft_long_p50_ms=TTFT of images, p50, ms; tokens_per_s=output tokens/s",
        turned=True,
    ),
    "images-again": Table(
        "images-beside",
        "alone",
        "ttft_ms=TTFT, ms; pixels_to_e_mib=pixels to E, MiB; pixels_to_p_mib=pixels to P, MiB;"
        "pixels_to_mixed_mib=pixels to an aggregated engine, MiB; embeddings_mib=embeddings, E to P, MiB;"
        "kv_mib=KV, P to D, MiB",
        ("workers", "image"),
    ),
    "startup": Table(
        "startup",
        lambda result: _swapped({"median": result["median_s"], "runs": result["runs_s"]}),
        "median=median, s; runs=runs, s",
    ),
    "gpu-answers": Table(
        "gpu-serve",
        "answers.arms",
        "equal=equal answers of 9; handoffs.total_ms=handoff, ms; drafted; accepted",
        ("way",),
        part="answers",
    ),
    "gpu-models": Table(
        "gpu-serve",
        "models.models",
        "equal; of; drafted; accepted; handoffs.mib=KV, MiB",
        ("way",),
        part="models",
    ),
    "gpu-streams": Table(
        "gpu-serve", _gpu("streams", "median"), _STREAMS, ("model", "fleet"), part="streams"
    ),
    "gpu-compiled": Table(
        "gpu-serve", _gpu("compiled", "median"), _STREAMS, ("model", "fleet"), part="compiled"
    ),
    "gpu-load": Table(
        "gpu-serve",
        _gpu("load", "arms"),
        ";".join(
            f"{many}.tokens_per_s=tokens/s at {many}; {many}.ttft_p50_ms=TTFT at {many}, ms"
            for many in (1, 8, 64, 256)
        ),
        ("model", "fleet"),
        part="load",
    ),
}
