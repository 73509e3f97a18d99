"""Measure demand from the growing counts of all routers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from baton.autoscale.histogram import TOKENS, middles
from baton.autoscale.loads import COUNTS, increase, summed
from baton.protos import scheduler_pb2 as pb

# s; the time constant of the rates: it determines a rate of 5 requests per second to within 10 %
SMOOTH_S = 10.0
_SMOOTHED = ("prompts", "images", *COUNTS)
FORGET_S = 600.0  # s; a router silent for longer starts afresh when heard again


@dataclass(frozen=True, slots=True)
class Totals:
    """The sum of all routers' counts since the meter started."""

    at: float
    load: pb.RouterLoad = field(default_factory=pb.RouterLoad)

    @property
    def requests(self) -> int:
        return sum(self.load.prompts)

    def since(self, then: Totals) -> Totals:
        """Return the counts since `then`; their `at` is the time that has passed."""
        return Totals(self.at - then.at, increase(self.load, then.load))


@dataclass(frozen=True, slots=True)
class Demand:
    """Smoothed arrival rates."""

    requests_per_s: float
    prompt_tokens_per_s: float  # cached ones included
    output_tokens: float  # mean length of recently completed answers; 0: unknown
    prompts: list[tuple[float, float]]  # tokens of a prompt, share of the requests
    waiting: int  # requests waiting in routers
    images: list[tuple[float, float]] = field(default_factory=list)  # tokens of an image, share of the images
    image_tokens_per_s: float = 0.0  # including those of images whose embeddings are kept


class DemandMeter:
    """Add up the reports of routers. A step costs one subtraction of some 150 numbers per router."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, pb.RouterLoad]] = {}
        self._started = False
        self.totals = Totals(0.0)
        self._rates: dict[str, list[float]] = {name: [] for name in _SMOOTHED}  # per second

    def take(self, at: float, routers: Mapping[str, pb.RouterLoad]) -> Demand:
        """Add what routers have counted since the last call."""
        before = self.totals
        self.totals = Totals(at, summed([before.load, *self._news(at, routers)]))
        if self._started:
            self._smooth(self.totals.since(before))
        self._started = True
        rate = {name: sum(values) for name, values in self._rates.items()}
        return Demand(
            rate["prompts"],
            rate["prompt_tokens"],
            rate["output_tokens"] / rate["over"] if rate["over"] > 1e-9 else 0.0,
            self._spread("prompts"),
            sum(load.waiting for load in routers.values()),
            self._spread("images"),
            rate["image_tokens"],
        )

    def _news(self, at: float, routers: Mapping[str, pb.RouterLoad]) -> list[pb.RouterLoad]:
        """Return each router's new counts. A router counts from zero unless it predates the meter."""
        news = []
        for key, load in routers.items():
            _, last = self._last.get(key, (at, pb.RouterLoad() if self._started else load))
            self._last[key] = (at, load)
            news.append(increase(load, last))
        for key in [key for key, (heard, _) in self._last.items() if heard < at - FORGET_S]:
            del self._last[key]
        return news

    def _smooth(self, new: Totals) -> None:
        if new.at <= 0:
            return
        keep = math.exp(-new.at / SMOOTH_S)
        rate = (1 - keep) / new.at
        for name, old in self._rates.items():
            counted = getattr(new.load, name)
            values = [counted] if isinstance(counted, int) else counted
            pairs = zip_longest(old, values, fillvalue=0)
            self._rates[name] = [keep * before + rate * more for before, more in pairs]

    def _spread(self, name: str) -> list[tuple[float, float]]:
        counts = self._rates[name]
        return middles(counts, TOKENS) if sum(counts) > 1e-9 else []
