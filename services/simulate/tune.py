"""The search for the split of workers into prefill and decode ones that serves a trace best.

The best split has the most requests a second within the goals; of equal ones (within `EQUAL`), the shortest
times to first token. With few workers every split is simulated. With many, some that lie apart are, and then
those between the best one and its neighbours, again and again: goodput has one peak over the splits, as a
side that is short loses requests and one that is long gains none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from baton.services.simulate.deployment import Split
from baton.services.simulate.figures import Run
from baton.services.simulate.simulation import Progress, Setup, simulate
from baton.services.simulate.traces import Trace

ALL_UP_TO = 9  # splits that are all tried
EQUAL = 0.005  # share of requests within the goals that is no difference


@dataclass(frozen=True)
class Tried:
    """One split, and what came of it."""

    split: Split
    run: Run

    @property
    def rank(self) -> tuple[float, float]:
        """The higher, the better."""
        first_ms = self.run.figures()["ttft_p90_ms"]
        return round(self.run.within / EQUAL), -math.inf if math.isnan(first_ms) else -first_ms


# Gets each split before it is simulated.
Begin = Callable[[Split], Progress | None]


def search(setup: Setup, trace: Callable[[], Trace], workers: int, begin: Begin) -> list[Tried]:
    """Simulate splits of so many workers, at least 2, and as many mixed ones; return them, the best first.

    `trace` makes the same trace anew for each. Raises BadPolicy.
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
        while step > 1:
            best = max(tried, key=lambda prefill: tried[prefill].rank)
            step = -(-step // 2) if step > 2 else 1
            attempt((best - step, best + step))
        _climb(tried, attempt)
    found = [*tried.values(), _try(setup, trace, Split(mixed=workers), begin)]
    return sorted(found, key=lambda one: one.rank, reverse=True)


def _climb(tried: dict[int, Tried], attempt: Callable[[Iterable[int]], None]) -> None:
    """Go on until both neighbours of the best split were tried."""
    while True:
        before = len(tried)
        best = max(tried, key=lambda prefill: tried[prefill].rank)
        attempt((best - 1, best + 1))
        if len(tried) == before:
            return


def _try(setup: Setup, trace: Callable[[], Trace], split: Split, begin: Begin) -> Tried:
    return Tried(split, simulate(replace(setup, split=split), trace(), begin(split)))
