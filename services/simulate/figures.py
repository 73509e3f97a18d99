"""The outcome of a simulation: the times of each request, and statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_FINENESS = 50  # buckets of gaps per factor of e, so each is 2 % wide
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(slots=True)
class Outcome:
    """One request. Times are virtual seconds; 0 if something never happened."""

    arrived: float
    prompt: int  # tokens
    output: int
    first: float = 0.0
    ended: float = 0.0
    waited_s: float = 0.0  # wait for room on a worker
    computed: int = 0  # prompt tokens computed
    hit: int = 0  # prompt tokens found in a cache
    known: int = 0  # cached tokens that the scheduler expected
    service: str = ""  # name of its class
    problem: str = ""  # why it failed

    @property
    def first_s(self) -> float:
        return self.first - self.arrived

    @property
    def gap_s(self) -> float:
        """The mean gap between tokens."""
        return (self.ended - self.first) / max(1, self.output - 1)


class Gaps:
    """A histogram of gaps between tokens, in buckets 2 % wide."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, gap_s: float, tokens: int = 1) -> None:
        """Count the same gap for each of `tokens` tokens."""
        self._counts[round(_FINENESS * math.log(max(gap_s, 1e-6)))] += tokens

    def clear(self) -> None:
        self._counts.clear()

    def percentile(self, share: float) -> float:
        """Return a percentile (`share` from 0 to 1) in seconds; nan without gaps."""
        passed, total = 0, self._counts.total()
        for bucket, tokens in sorted(self._counts.items()):
            passed += tokens
            if tokens and passed >= share * total:
                return math.exp(bucket / _FINENESS)
        return math.nan


@dataclass(frozen=True)
class Goals:
    """Goals for a request, in seconds: time to first token, and mean gap between tokens."""

    ttft_s: float
    itl_s: float

    def met(self, one: Outcome) -> bool:
        """Return whether a request succeeded and met both goals."""
        return not one.problem and one.first_s <= self.ttft_s and one.gap_s <= self.itl_s


@dataclass
class Run:
    """The outcome of one simulation."""

    outcomes: list[Outcome]  # sorted by arrival, without the warm-up
    seconds: float  # the time in which they arrived
    gaps: Gaps
    goals: Goals
    busy: dict[str, float]  # worker -> share of the time in steps
    requests: int  # including the warm-up
    wall_s: float = 0.0  # real time
    _done: list[Outcome] = field(init=False)

    def __post_init__(self) -> None:
        self._done = [one for one in self.outcomes if not one.problem]

    @property
    def within(self) -> float:
        """The share of requests within both goals."""
        return sum(map(self.goals.met, self.outcomes)) / max(1, len(self.outcomes))

    def figures(self) -> dict[str, float]:
        """Return statistics by name, in milliseconds, shares, or requests per second."""
        done = self._done
        first = [one.first_s for one in done]
        prompts = max(1, sum(one.prompt for one in done))
        rate = len(self.outcomes) / self.seconds
        return {
            "requests": len(self.outcomes),
            "failed": len(self.outcomes) - len(done),
            "requests_per_s": round(rate, 3),
            "ttft_mean_ms": _ms(_mean(first)),
            **_percentiles("ttft", first),
            **{f"itl_{name}_ms": _ms(self.gaps.percentile(share)) for name, share in SHARES.items()},
            **_percentiles("e2e", [one.ended - one.arrived for one in done]),
            "computed_tokens": sum(one.computed for one in done),
            "prompt_tokens": sum(one.prompt for one in done),
            "computed_share": round(sum(one.computed for one in done) / prompts, 4),
            "known_share": round(sum(one.known for one in done) / prompts, 4),
            "within_goals": round(self.within, 4),
            "goodput_per_s": round(self.within * rate, 3),
            "longest_wait_s": round(max((one.waited_s for one in self.outcomes), default=0.0), 3),
            "waited": sum(one.waited_s > 0 for one in self.outcomes),
            **self._busy_by_role(),
            "simulated": self.requests,
            "simulated_per_s": round(self.requests / self.wall_s) if self.wall_s else 0,
        }

    def _busy_by_role(self) -> dict[str, float]:
        shares: dict[str, list[float]] = {}
        for name, share in self.busy.items():
            shares.setdefault(name.split("-")[0], []).append(share)
        return {
            **{f"busy_{role}": round(_mean(values), 3) for role, values in shares.items()},
            **{f"busiest_{role}": round(max(values), 3) for role, values in shares.items()},
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile (`share` from 0 to 1); nan without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_{one}_ms": _ms(percentile(values, share)) for one, share in SHARES.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
