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
    parts: tuple[str, ...] = ()  # the parts shown, if each part of the file has its own command

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


def _only(path: str, *labels: str) -> Callable[[Result], Any]:
    """Return a view of the figures at a path that keeps these labels of their innermost level."""

    def kept(node: dict[str, Any]) -> dict[str, Any]:
        found = {label: node[label] for label in labels if label in node}
        return found or {key: kept(child) for key, child in node.items()}

    def view(result: Result) -> Any:
        for key in path.split("."):
            result = result[key]
        return kept(result)

    return view


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


def _overload(result: Result) -> Any:
    return {
        "one stream alone": result["alone"],
        "a full house": result["full"],
        "overload": result["overload"],
        "one stream afterwards": result["after"]["alone"],
    }


def _gpu(part: str, figures: str) -> Callable[[Result], Any]:
    return lambda result: {f"{size}B": found[figures] for size, found in result.get(part, {}).items()}


def _gpu_streams(result: Result) -> Any:
    found: Any = _gpu("streams", "median")(result)
    for size, fleets in found.items():
        found[size] = {fleet: fleets[fleet] for fleet in ("1P1D", "one-stock")}
    compiled = _gpu("compiled", "median")(result)
    return found | {f"{size}, compiled": one for size, one in compiled.items()}


def _equal(cell: dict[str, Any]) -> str:
    return f"{cell['equal']}/{cell['of']}"


def per_draft(cell: dict[str, Any]) -> float:
    return float(cell["accepted"] / cell["drafts"]) if cell["drafts"] else 0.0


def _shapes(result: Result) -> Any:
    """Return each shape's models with accepted tokens per draft, and the sides whose answers differ."""
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
_HANDOFFS = [
    f"{transport}{form}" for form in ("", ", fp8_e4m3") for transport in ("shm", "nixl", "nixl, TCP")
]
IMAGE_FAMILIES = {
    "qwen2.5-vl": "Qwen2.5-VL: positions depend on images (M-RoPE)",
    "qwen3-vl": "Qwen3-VL: DeepStack",
    "qwen3.5-vision": "Qwen3.5: states, with [`--no-enable-prefix-caching`](handoff-wire.md#the-format)",
    "gemma3-vision": "Gemma 3: sliding windows",
    "llava": "LLaVA",
    "smolvlm": "SmolVLM: images are cut into tiles",
}

TABLES = {
    "disaggregation": Table("disaggregation", _ratio, _MIX, turned=True),
    "clients": Table(
        "clients",
        _only("median", "1", "8", "128", "inf"),
        f"failed; tokens_per_s; {_LATENCIES}",
        ("concurrent requests", "server"),
    ),
    "speculation": Table(
        "speculation",
        lambda result: _served(result)["1P1D"],
        ";".join(
            f"{kind}.{streams}={kind}, {streams} at a time|.2f"
            for kind in ("chat", "repetitive")
            for streams in (1, 16)
        ),
        ("method",),
    ),
    "fair-share": Table(
        "fair-share",
        _only("models.qwen2-80m", "as vLLM does", "shares, order"),
        "short_p50_ms; short_p99_ms; long_p50_ms; flood_tokens_per_s=flood, tokens/s",
    ),
    "path": Table("path", "median_ms", "total=p50, ms; total_p95=p95, ms", ("transport",)),
    "handoff": Table(
        "handoff",
        lambda result: _only("tokens", *_HANDOFFS)({"tokens": _swapped(result["tokens"])}),
        ";".join(
            ["900.MB=MB of 900 tokens", *(f"{many}.total_ms={many} tokens, ms" for many in (100, 900, 3600))]
        ),
        ("transport, format",),
    ),
    "gangs": Table(
        "gangs",
        _only("costs", "one", "two", "idle"),
        ";".join(
            f"{key}.{arm}.p50={arm}, {name}"
            for key, name in (("tokens_per_s", "tokens/s"), ("ttft_ms", "TTFT, ms"))
            for arm in ("plain", "gang")
        ),
        ("engines",),
    ),
    "router": Table(
        "router",
        lambda result: {f"{one['interval_ms']:g} ms": one for one in result["runs"]},
        "tokens_per_s; router_cpu_us_per_token=CPU per token, µs; router_rss_mib=RSS, MiB",
        ("step",),
    ),
    "scheduler": Table(
        "scheduler",
        _only(
            "arms.here",
            "memory, 20 routers, 1 scheduler, 32P32D",
            "redis, 20 routers, 1 scheduler, 32P32D",
            "stopped, 20 routers, 1 scheduler, 32P32D",
            "redis, 100 routers, 1 scheduler, 32P32D",
            "redis, 20 routers, 1 scheduler, 500P500D",
            "redis, 20 routers, 2 schedulers, 32P32D",
        ),
        "failed; place_p50_ms; place_p99_ms=p99; cpu_us; fast_placed_per_s=fast: placed/s",
        ("deployment",),
    ),
    "overload": Table(
        "overload",
        _overload,
        "itl_p50_ms=gap p50, ms; itl_p99_ms=gap p99, ms; itl_max_ms=longest gap, ms; ttft_p50_ms; answers",
    ),
    "overload-refused": Table(
        "overload",
        lambda result: {"overload": result["overload"] | result["after"]},
        "admitted_share=admitted|.0%;"
        "refused=refused with 503; refused_p50_ms=time of a refusal p50, ms; refused_p99_ms=p99;"
        "without_retry_after=without Retry-After; broken=broken streams; blocks_missing=KV blocks missing",
        turned=True,
    ),
    "classes": Table(
        "classes", _classes, f"{_LATENCIES}; batch=batch tokens/s", ("", "interactive requests")
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
        _by_trace("chats", "agents", "prompts"),
        ("policy",),
    ),
    "peers": Table(
        "peers",
        "median",
        "alone_ttft_p50_ms=one long prompt alone: TTFT p50, ms;"
        "alone_second_p50_ms=its second token after the first, p50, ms;"
        "alone_cpu_s=its CPU time, s;"
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
        _only("alone", "1P1D", "1E1P1D", "1E1P1D, room for one"),
        "ttft_ms=TTFT, ms; pixels_to_e_mib=pixels to E, MiB; pixels_to_p_mib=pixels to P, MiB;"
        "embeddings_mib=embeddings, E to P, MiB",
        ("workers", "image"),
    ),
    "startup": Table(
        "startup",
        lambda result: _swapped({"median": result["median_s"], "runs": result["runs_s"]}),
        "median=median, s; runs=runs, s",
    ),
    "gpu-streams": Table(
        "gpu-serve", _gpu_streams, _STREAMS, ("model", "fleet"), parts=("streams", "compiled")
    ),
    "gpu-load": Table(
        "gpu-serve",
        _gpu("load", "arms"),
        ";".join(
            f"{many}.tokens_per_s=tokens/s at {many}; {many}.ttft_p50_ms=TTFT at {many}, ms"
            for many in (1, 256)
        ),
        ("model", "fleet"),
        parts=("load",),
    ),
}
