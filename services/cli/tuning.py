"""The search of `baton tune`, its progress and its table."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from baton.services.cli.tables import Column, fitted
from baton.services.config import Settings
from baton.services.errors import ConfigError
from baton.services.simulate import mooncake, profile
from baton.services.simulate.deployment import Setup, Split
from baton.services.simulate.figures import Goals
from baton.services.simulate.simulation import Progress
from baton.services.simulate.traces import KINDS, Conversations, Trace
from baton.services.simulate.tune import Tried, search


@dataclass(frozen=True)
class Load:
    """The trace that the command names."""

    name: str  # a file, or a kind
    rate: float
    seconds: float
    speed: float
    most: int
    seed: int

    def trace(self, longest: int) -> Callable[[], Trace]:
        """Return a function that makes the trace. Raises ConfigError.

        Generated requests have fewer than `longest` tokens.
        """
        if kind := KINDS.get(self.name):
            return lambda: Conversations(
                kind, self.rate, self.seconds, seed=self.seed, most_tokens=longest - 1
            )
        file = Path(self.name)
        if not file.exists():
            raise ConfigError(f"{self.name} is neither a file nor a kind of trace ({', '.join(KINDS)})")
        read = mooncake.read(file, speed=self.speed, most=self.most)
        return lambda: read


def run_tune(
    settings: Settings, load: Load, workers: int, goals: Goals, profile_file: Path | None, *, as_json: bool
) -> None:
    """Search, and print the splits, the best first. Raises ConfigError and BadPolicy."""
    shape = profile.load(profile_file) if profile_file else profile.Profile()
    setup = Setup(Split(1, 1), shape, settings.scheduler, settings.router, goals, seed=load.seed)
    found = search(setup, load.trace(shape.engine.max_model_len), workers, _progress)
    if as_json:
        print(json.dumps([{"split": one.split.flags, **_known(one)} for one in found], indent=2))
    else:
        _show(load.name, found, goals, shape.name)


def _known(one: Tried) -> dict[str, float]:
    """Return the figures without NaN, which JSON lacks."""
    return {key: value for key, value in one.run.figures().items() if not math.isnan(value)}


def _progress(split: Split) -> Progress:
    began = time.monotonic()
    print(f"  {split} ...", file=sys.stderr, flush=True)

    def tell(share: float, over: int) -> None:
        took = time.monotonic() - began
        print(f"  {split}: {share:.0%}, {over:,} requests, {took:.0f} s", file=sys.stderr, flush=True)

    return tell


def _show(trace: str, found: list[Tried], goals: Goals, name: str) -> None:
    def cell(key: str, shape: str) -> Callable[[Tried], str]:
        return lambda one: format(one.run.figures().get(key, 0), shape)

    columns = [
        Column[Tried]("split", lambda one: str(one.split)),
        Column[Tried]("within goals", lambda one: f"{one.run.within:.1%}", number=True),
        Column("goodput/s", cell("goodput_per_s", ".2f"), number=True, rank=9),
        Column("TTFT p50 ms", cell("ttft_p50_ms", ",.0f"), number=True, rank=7),
        Column("p99 ms", cell("ttft_p99_ms", ",.0f"), number=True, rank=8),
        Column("ITL p50 ms", cell("itl_p50_ms", ".1f"), number=True, rank=5),
        Column("p99 ms", cell("itl_p99_ms", ".1f"), number=True, rank=6),
        Column("computed", cell("computed_share", ".0%"), number=True, rank=4),
        Column("failed", cell("failed", ",.0f"), number=True, rank=3),
    ]
    best = found[0]
    title = f"{trace}, {best.split.workers} workers ({name}): TTFT {goals.ttft_s:g} s, ITL {goals.itl_s:g} s"
    width = shutil.get_terminal_size((110, 24)).columns
    Console(width=width, highlight=False).print(fitted(title, columns, found, width))
    print(f"baton up {best.split.flags}\n")
    print(f"slo:\n  ttft_ms: {1e3 * goals.ttft_s:g}\n  itl_ms: {1e3 * goals.itl_s:g}")
    if best.run.within < 0.99:
        print(f"\nNo split keeps 99 % of the requests within the goals, the best {best.run.within:.1%}.")
