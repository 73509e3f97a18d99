"""Baton's figures beside others in one table, for the top of docs/benchmarks.md and for README."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.report_sections import Block, Result, longest_gap, table

METHOD = "mtp + suffix"  # of the lines on speculative decoding


class _Line(NamedTuple):
    what: str
    ours: float
    against: str
    theirs: float
    less: bool = True  # is better

    def row(self) -> list[str]:
        """Return the line's cells, the better figure in bold."""
        cells = [f"{value:.1f}" if value < 30 else f"{value:,.0f}" for value in (self.ours, self.theirs)]
        better = 0 if (self.ours < self.theirs) == self.less else 1
        cells[better] = f"**{cells[better]}**"
        return [self.what, cells[0], f"{cells[1]} ({self.against})"]


def brief(results: dict[str, Result]) -> str:
    """Return the table, with a note on it. Raises KeyError where a result is missing."""
    note = (
        "Figures by concurrency are those of `vllm bench serve` with random prompts, against `deploy/laptop.yaml` (1P1D with "
        "drafts) and one stock vLLM server (without) on the same cores. The better figure is bold.\n"
    )
    return table(["", "Baton", "compared with"], [line.row() for line in _lines(results)]) + "\n" + note


def headline(results: dict[str, Result]) -> str:
    """Return README's first figures: the longest gap between tokens without Baton, and with it."""
    arms = results["disaggregation"]["median"]
    theirs, ours = (arms[arm]["itl_max_ms"] for arm in ("2 aggregated", "1P1D"))
    return f"[from {theirs:.0f} ms to {ours:.0f} ms](#measured)"


def measured(results: dict[str, Result]) -> list[Block]:
    """Return the blocks of README's section. Raises KeyError where a result is missing."""
    handoff = results["path"]
    machines = [results[name]["machine"] for name in ("disaggregation", "clients", "path", "router")]
    runs = [run for run in results["router"]["runs"] if run["interval_ms"]]
    router = max(runs, key=lambda run: run["tokens_per_s"])
    return [
        longest_gap(results["disaggregation"]),
        f"On {machines[0]['cores']} cores ({', '.join(dict.fromkeys(one['cpu'] for one in machines))}):\n",
        brief(results),
        f"A handoff of {handoff['tokens']} tokens takes {handoff['median_ms']['shm']['total']:.0f} ms over shared memory and "
        f"{handoff['median_ms']['tcp']['total']:.0f} ms over TCP. One router process carries {router['tokens_per_s']:,} "
        f"tokens/s at {router['streams']} streams.\n",
        "All figures, and how they were measured: [docs/benchmarks.md](docs/benchmarks.md). Each section names its command.\n",
    ]


def _lines(results: dict[str, Result]) -> Iterator[_Line]:
    arms = results["disaggregation"]["median"]
    ours, theirs, other = arms["1P1D"], arms["2 aggregated"], "two aggregated engines"
    beside = "beside long prompts"
    for what, key in (
        ("longest gap between tokens", "itl_max_ms"),
        ("time to first token", "ttft_short_p50_ms"),
    ):
        yield _Line(f"{what} of short requests {beside}, ms", ours[key], other, theirs[key])
    yield _Line(f"output tokens/s {beside}", ours["tokens_per_s"], other, theirs["tokens_per_s"], less=False)
    rows = results["clients"]["tools"]["serve"]["median"]
    for load in ("1", "8", "128"):
        ours, theirs, other = rows[load]["baton"], rows[load]["stock"], "stock vLLM"
        at = f"at {load} concurrent request{'s' if load != '1' else ''}"
        yield _Line(f"output tokens/s {at}", ours["tokens_per_s"], other, theirs["tokens_per_s"], less=False)
        yield _Line(f"time to first token {at}, p50, ms", ours["ttft_p50_ms"], other, theirs["ttft_p50_ms"])
        yield _Line(f"inter-token latency {at}, p99, ms", ours["itl_p99_ms"], other, theirs["itl_p99_ms"])
    for kind in ("chat", "repetitive"):
        row = results["speculation"]["served"]["1P1D"][METHOD][kind]["1"]
        what = f"{kind} answers with `mtp` and suffixes, ms an output token"
        yield _Line(what, row[METHOD], "Baton without drafts", row["none"])
    behind = results["fair-share"]["models"]["qwen2-80m"]["behind 4"]
    ways = behind["shares, order"]["short_p50_ms"], behind["as vLLM does"]["short_p50_ms"]
    yield _Line(
        "first token of short prompts behind 4 long ones, p50, ms", ways[0], "vLLM's own order", ways[1]
    )
    start = results["startup"]["median_s"]
    yield _Line(
        "from the command to the first token, s", start["baton up"], "stock vLLM", start["stock vLLM"]
    )
