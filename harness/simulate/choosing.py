"""Placement by routers that choose, beside today's booking: the same requests, cell by cell.

    python -m harness.simulate.choosing run FILE --pairs 32 --routers 20 --seeds 0 1 2
    python -m harness.simulate.choosing table FILE

Each cell is written to FILE, a JSON line each, as soon as it is there; one that is there already is not run
again. The times of messages are those of docs/benchmarks.md: a placement over Redis, one in memory for a
look-up, and half of the stages `send` and `reply` for a message to a worker.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.services.classes import Classes
from baton.services.config import PolicySettings, SchedulerSettings
from baton.services.simulate.booked import Wire
from baton.services.simulate.chosen import Choosing
from baton.services.simulate.deployment import Split
from baton.services.simulate.figures import Goals, Outcome, Run, percentile
from baton.services.simulate.simulation import Setup, simulate
from baton.services.simulate.traces import KINDS, Ask, Conversations, Kind, Trace
from harness.simulate.baselines import install
from harness.simulate.compare import LOADS

WIRE = Wire(message_s=0.0012, place_s=0.0014, look_up_s=0.0009)
FOUR, EIGHT = PolicySettings(), PolicySettings(picker="power_of_eight")
ARMS: dict[str, tuple[Choosing | None, PolicySettings]] = {
    "today": (None, FOUR),
    "chosen": (Choosing(), FOUR),
    "eight": (Choosing(), EIGHT),
    "pushed": (Choosing(pushed=True), FOUR),
    "noted": (Choosing(noted=True), FOUR),
    "held": (Choosing(desks=1, together=True), FOUR),
    "held by 4": (Choosing(desks=4, together=True), FOUR),
    "expecting": (Choosing(expects=True, tries=8), FOUR),
    "asked": (Choosing(asked=4, together=True), FOUR),
}
# Seconds of arrivals, at 32P32D and at 500P500D; two fifths of it do not count.
SECONDS = {
    "chats": (75.0, 40.0),
    "agents": (75.0, 40.0),
    "documents": (90.0, 60.0),
    "prompts": (30.0, 10.0),
    "classes": (20.0, 8.0),
    "overload": (12.0, 6.0),
}
WARM = 0.4
TTFT_S = {"classes": 2.0}  # goals; beside batch work a step takes a second here, as nothing shortens it
LONGEST = 199_999


class Together(Trace):
    """Requests of several traces, each of a class."""

    def __init__(self, parts: dict[str, Conversations]) -> None:
        """Join traces of requests that nothing follows on, by the names of their classes."""
        self.seconds = max(one.seconds for one in parts.values())
        self._parts = parts
        self._classes = Classes()

    def begin(self) -> Iterator[Ask]:
        parts = [self._of(name, trace) for name, trace in self._parts.items()]
        yield from heapq.merge(*parts, key=lambda ask: ask.at)

    def _of(self, name: str, trace: Conversations) -> Iterator[Ask]:
        service = self._classes.get(name)
        if service is None:
            raise KeyError(name)
        return (replace(ask, service=service) for ask in trace.begin())


def trace_of(name: str, pairs: int, seconds: float, seed: int) -> Trace:
    """Return one of the traces of docs/benchmarks.md at its load, or one of the two that fill all workers."""

    def conversations(kind: Kind, per_s: float, seed: int) -> Conversations:
        return Conversations(kind, per_s * pairs, seconds, seed=seed, most_tokens=LONGEST)

    prompts = KINDS["prompts"]
    if name == "classes":  # prefill workers compute 4 of these a second each
        batch = conversations(prompts, 3.5, seed + 1_000)
        return Together({"interactive": conversations(prompts, 1.3, seed), "batch": batch})
    if name == "overload":
        return conversations(prompts, 8.0, seed)
    return conversations(KINDS[name], LOADS[name], seed)


@dataclass(frozen=True)
class Cell:
    """One simulation."""

    pairs: int
    routers: int
    trace: str
    arm: str
    seed: int

    def run(self) -> dict[str, Any]:
        """Return its figures."""
        choosing, policy = ARMS[self.arm]
        seconds = SECONDS[self.trace][self.pairs > 100]
        setup = Setup(
            Split(self.pairs, self.pairs),
            scheduler=SchedulerSettings(policy=policy),
            goals=Goals(TTFT_S.get(self.trace, 0.5), 0.05),
            routers=self.routers,
            seed=self.seed,
            warm_share=WARM,
            wire=WIRE,
            choosing=choosing,
        )
        run = simulate(setup, trace_of(self.trace, self.pairs, seconds, self.seed))
        return {**vars(self), **_figures(run)}


def _figures(run: Run) -> dict[str, Any]:
    all_figures = run.figures()
    keys = ("requests", "failed", "refused_once", "refused_twice", "fullest", "longest_wait_s", "waited")
    kept = {
        key: all_figures[key]
        for key in (*keys, "questions", "itl_p99_ms", "computed_share", "simulated_per_s")
    }
    return {
        **kept,
        "wall_s": round(run.wall_s, 1),
        "busiest": all_figures.get("busiest_prefill"),
        "busy": all_figures.get("busy_prefill"),
        "first_ms": [round(1e3 * one.first_s) for one in run.outcomes if not one.problem and _counts(one)],
        "within": [round(run.goals.met(one)) for one in run.outcomes if _counts(one)],
        "batch_wait_s": max((one.waited_s for one in run.outcomes if not _counts(one)), default=0.0),
    }


def _counts(one: Outcome) -> bool:
    """Return whether goals are asked of a request."""
    return one.service != "batch"


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def measure(options: argparse.Namespace) -> None:
    """Run the cells that are not there yet."""
    install()
    names = tuple(Cell.__annotations__)
    there = {tuple(row[name] for name in names) for row in _read(options.file)}
    order = itertools.product(options.seeds, options.routers, options.traces, options.arms)
    for seed, routers, trace, arm in order:
        cell = Cell(options.pairs, routers, trace, arm, seed)
        if tuple(vars(cell).values()) in there:
            continue
        row = cell.run()
        with options.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(_line([row]), flush=True)


def _line(rows: list[dict[str, Any]]) -> str:
    """Return one row of the table, of all seeds together."""
    first, one = sorted(itertools.chain(*(row["first_ms"] for row in rows))), rows[0]
    within = list(itertools.chain(*(row["within"] for row in rows)))
    p99s = [percentile(row["first_ms"], 0.99) for row in rows]

    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in rows)

    cells = (
        f"{one['pairs']}P{one['pairs']}D",
        one["trace"],
        one["routers"],
        one["arm"],
        len(rows),
        f"{len(within):,}",
        f"{percentile(first, 0.5):,.0f}",
        f"{percentile(first, 0.99):,.0f}",
        f"{min(p99s):,.0f} to {max(p99s):,.0f}",
        f"{statistics.fmean(within):.1%}",
        f"{mean('refused_once'):.2%}",
        f"{mean('refused_twice'):.2%}",
        f"{max(row['fullest'] for row in rows):.0%}",
        f"{max(row['longest_wait_s'] for row in rows):.2f}",
        f"{mean('itl_p99_ms'):.1f}",
        f"{sum(row['failed'] for row in rows)}",
    )
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| fleet | trace | routers | placed by | seeds | requests | TTFT p50 ms | p99 | p99 by seed "
    "| within goals | refused once | twice | fullest | longest wait s | ITL p99 ms | failed |\n"
    + "| --- " * 16
    + "|"
)


def table(options: argparse.Namespace) -> None:
    """Print all cells, seeds together."""
    print(HEAD)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    traces, arms = list(SECONDS), list(ARMS)
    for row in _read(options.file):
        key = row["pairs"], traces.index(row["trace"]), row["routers"], arms.index(row["arm"])
        groups.setdefault(key, []).append(row)
    for key in sorted(groups):
        print(_line(groups[key]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_subparsers(required=True)
    runs = action.add_parser("run", help="run cells")
    runs.set_defaults(call=measure)
    shows = action.add_parser("table", help="print a table of all cells")
    shows.set_defaults(call=table)
    for one in (runs, shows):
        one.add_argument("file", type=Path)
    runs.add_argument("--pairs", type=int, default=32)
    runs.add_argument("--routers", type=int, nargs="+", default=[2, 20, 100])
    runs.add_argument("--traces", nargs="+", choices=SECONDS, default=list(SECONDS))
    runs.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    runs.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
