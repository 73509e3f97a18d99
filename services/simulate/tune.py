"""Search for the split into prefill and decode workers that serves a trace best.

The best split has the most requests within the goals; among equals (within `EQUAL`), it has the shortest
times to first token. With few workers all splits are simulated. With many, a coarse grid is refined
around the best split, because goodput has a single peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from baton.services.simulate.deployment import Setup, Split
from baton.services.simulate.figures import Run
from baton.services.simulate.simulation import Progress, simulate
from baton.services.simulate.traces import Trace

ALL_UP_TO = 9  # if there are more splits, only some are simulated
EQUAL = 0.005  # smaller differences in the share within the goals are ignored


@dataclass(frozen=True)
class Tried:
    split: Split
    run: Run

    @property
    def rank(self) -> tuple[float, float]:
        """A sort key: higher is better."""
        first_ms = self.run.figures()["ttft_p90_ms"]
        return round(self.run.within / EQUAL), -math.inf if math.isnan(first_ms) else -first_ms


# Called with each split before it is simulated.
Begin = Callable[[Split], Progress | None]


def search(setup: Setup, trace: Callable[[], Trace], workers: int, begin: Begin) -> list[Tried]:
    """Simulate splits of `workers` workers (2 or more), and as many mixed workers; return the best first.

    `trace` returns a new copy of the trace for each split. Raises BadPolicy.
    """
    tried: dict[int, Tried] = {}

    def attempt(numbers: Iterable[int]) -> None:
        for prefill in numbers:
            if 0 < prefill < workers and prefill not in tried:
                tried[prefill] = _try(setup, trace, Split(prefill, workers - prefill), begin)

    if workers - 1 <= ALL_UP_TO:
        attempt(range(1, workers))
    else:
        step = max(1, workers // 8)
        attempt(range(step, workers, step))
        while True:
            before, best = len(tried), max(tried, key=lambda prefill: tried[prefill].rank)
            attempt((best - step, best + step))
            if len(tried) == before and step == 1:
                break
            if len(tried) == before:
                step = -(-step // 2)
    found = [*tried.values(), _try(setup, trace, Split(mixed=workers), begin)]
    return sorted(found, key=lambda one: one.rank, reverse=True)


def _try(setup: Setup, trace: Callable[[], Trace], split: Split, begin: Begin) -> Tried:
    return Tried(split, simulate(replace(setup, split=split), trace(), begin(split)))
