"""Measure demand from the growing counts of all routers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.autoscale.histogram import SECONDS, TOKENS, middles
from baton.protos import scheduler_pb2 as pb

# s; the time constant of the rates: it determines a rate of 5 requests per second to within 10 %
SMOOTH_S = 10.0
FORGET_S = 600.0  # s; a router silent for longer starts afresh when heard again


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of all routers' counts since the meter started."""

    at: float
    requests: float = 0.0
    prompt_tokens: float = 0.0
    over: float = 0.0
    output_tokens: float = 0.0
    prompts: Sequence[float] = (0.0,) * (len(TOKENS) + 1)
    first_token: Sequence[float] = (0.0,) * (len(SECONDS) + 1)
    gap: Sequence[float] = (0.0,) * (len(SECONDS) + 1)
    images: Sequence[float] = (0.0,) * (len(TOKENS) + 1)
    image_tokens: float = 0.0

    def since(self, then: Totals) -> Totals:
        """Return the counts since `then`; their `at` is the time that has passed."""
        return Totals(
            self.at - then.at,
            self.requests - then.requests,
            self.prompt_tokens - then.prompt_tokens,
            self.over - then.over,
            self.output_tokens - then.output_tokens,
            _minus(self.prompts, then.prompts),
            _minus(self.first_token, then.first_token),
            _minus(self.gap, then.gap),
            _minus(self.images, then.images),
            self.image_tokens - then.image_tokens,
        )


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
        self._requests = 0.0  # per second, smoothed, like the following figures
        self._prompt_tokens = 0.0
        self._over = 0.0
        self._output_tokens = 0.0
        self._prompts: list[float] = [0.0] * (len(TOKENS) + 1)
        self._images: list[float] = [0.0] * (len(TOKENS) + 1)
        self._image_tokens = 0.0

    def take(self, at: float, routers: Mapping[str, pb.RouterLoad]) -> Demand:
        """Add what routers have counted since the last call."""
        before = self.totals
        self.totals = self._add(at, routers)
        if self._started:
            self._smooth(self.totals.since(before))
        self._started = True
        mean = self._output_tokens / self._over if self._over > 1e-9 else 0.0
        return Demand(
            self._requests,
            self._prompt_tokens,
            mean,
            _spread(self._prompts),
            sum(load.waiting for load in routers.values()),
            _spread(self._images),
            self._image_tokens,
        )

    def _add(self, at: float, routers: Mapping[str, pb.RouterLoad]) -> Totals:
        """Return the totals with new counts added. A router counts from zero unless it predates the meter."""
        total = self.totals
        for key, load in routers.items():
            _, last = self._last.get(key, (at, None if self._started else load))
            self._last[key] = (at, load)
            last = last or pb.RouterLoad()
            prompts = _grow(total.prompts, load.prompts, last.prompts)
            total = Totals(
                at,
                sum(prompts),
                total.prompt_tokens + load.prompt_tokens - last.prompt_tokens,
                total.over + load.over - last.over,
                total.output_tokens + load.output_tokens - last.output_tokens,
                prompts,
                _grow(total.first_token, load.first_token, last.first_token),
                _grow(total.gap, load.gap, last.gap),
                _grow(total.images, load.images, last.images),
                total.image_tokens + load.image_tokens - last.image_tokens,
            )
        for key in [key for key, (heard, _) in self._last.items() if heard < at - FORGET_S]:
            del self._last[key]
        return replace(total, at=at)

    def _smooth(self, new: Totals) -> None:
        if new.at <= 0:
            return
        keep = math.exp(-new.at / SMOOTH_S)
        rate = (1 - keep) / new.at
        self._requests = keep * self._requests + rate * new.requests
        self._prompt_tokens = keep * self._prompt_tokens + rate * new.prompt_tokens
        self._over = keep * self._over + rate * new.over
        self._output_tokens = keep * self._output_tokens + rate * new.output_tokens
        self._image_tokens = keep * self._image_tokens + rate * new.image_tokens
        self._prompts = [
            keep * old + rate * more for old, more in zip(self._prompts, new.prompts, strict=True)
        ]
        self._images = [keep * old + rate * more for old, more in zip(self._images, new.images, strict=True)]


def _spread(counts: Sequence[float]) -> list[tuple[float, float]]:
    return middles(counts, TOKENS) if sum(counts) > 1e-9 else []


def _grow(total: Sequence[float], now: Sequence[int], then: Sequence[int]) -> list[float]:
    """Add the increase of a router's counts; counts it has not sent are zeros."""
    size = len(total)
    counts = [*now, *[0] * (size - len(now))]
    before = [*then, *[0] * (size - len(then))]
    return [all_ + new - old for all_, new, old in zip(total, counts, before, strict=False)]


def _minus(now: Sequence[float], then: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(now, then, strict=True)]
