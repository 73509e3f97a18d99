"""Buckets with fixed bounds, so that a distribution is a short list of counts that can be added up.

A bucket holds the values up to its bound and above the previous one; the last bucket holds all values
above the last bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = tuple(0.001 * 1.25**step for step in range(54))  # 1 ms to 137 s
TOKENS = tuple(16 * 2**step for step in range(17))  # 16 to 1 Mi

Bounds = tuple[float, ...]


class Histogram:
    """Count values by bucket since the start. Adding a value is a search among the bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1


def share_below(counts: Sequence[float], bounds: Bounds, limit: float) -> float | None:
    """Return the share of the values that are at most `limit`; None without values.

    Values are assumed evenly spread within a bucket.
    """
    total = sum(counts)
    if not total:
        return None
    bucket = bisect_left(bounds, limit)
    whole = sum(counts[:bucket])
    if bucket < len(bounds):
        low = bounds[bucket - 1] if bucket else 0.0
        whole += counts[bucket] * (limit - low) / (bounds[bucket] - low)
    return whole / total


def middles(counts: Sequence[float], bounds: Bounds) -> list[tuple[float, float]]:
    total = sum(counts)
    lows = (0.0, *bounds)
    highs = (*bounds, bounds[-1] * 2)
    buckets = zip(lows, highs, counts, strict=True)
    return [((low + high) / 2, count / total) for low, high, count in buckets if count]


def quantile(counts: Sequence[float], bounds: Bounds, share: float) -> float | None:
    """Return the value below which `share` of the values lie; None without values.

    Values are assumed evenly spread within a bucket; those above the last bound count as twice that bound.
    """
    left = share * sum(counts)
    if not left:
        return None
    low = 0.0
    for bound, count in zip((*bounds, 2 * bounds[-1]), counts, strict=True):
        if left <= count:
            return low + (bound - low) * left / count
        left -= count
        low = bound
    return low
