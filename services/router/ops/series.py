"""The last quarter of an hour, one sample per second; each covers the ten seconds before it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from baton.autoscale.histogram import SECONDS, quantile
from baton.protos import scheduler_pb2 as pb
from baton.services.overview.workers import Sums

KEPT = 900  # samples
WINDOW = 10  # samples
COLUMNS = (
    "at",  # seconds since 1970
    "ttft_p50_ms",  # this router's requests
    "ttft_p99_ms",
    "itl_p50_ms",  # mean gap between tokens, of finished answers
    "itl_p99_ms",
    "requests_per_s",
    "waiting",  # requests waiting for room on the workers
    "live",
    "output_tokens_per_s",  # all workers
    "prefill_tokens_per_s",
    "acceptance",
)


class Series:
    """Samples of this router's latencies and of the workers' throughput."""

    def __init__(
        self,
        load: Callable[[], pb.RouterLoad],
        live: Callable[[], int],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Sample `load`, this router's request counts, and `live`, the requests waiting or running."""
        self._load = load
        self._live = live
        self._now_s = now_s
        self._window: deque[tuple[float, pb.RouterLoad]] = deque(maxlen=WINDOW + 1)
        self.samples: deque[list[Any]] = deque(maxlen=KEPT)

    def sample(self, sums: Sums) -> list[Any]:
        """Take a sample, which costs some 250 additions."""
        now = self._now_s()
        load = self._load()
        self._window.append((now, load))
        then, before = self._window[0]
        took = max(now - then, 1e-9)
        first = _since(load.first_token, before.first_token)
        gap = _since(load.gap, before.gap)
        ended = load.over - before.over
        one = [
            round(now, 2),
            _ms(first, 0.5),
            _ms(first, 0.99),
            _ms(gap, 0.5),
            _ms(gap, 0.99),
            round(ended / took, 2) if len(self._window) > 1 else 0.0,
            load.waiting,
            self._live(),
            sums.output_tokens_per_s,
            sums.prefill_tokens_per_s,
            sums.acceptance,
        ]
        self.samples.append(one)
        return one


def _since(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [one - other for one, other in zip(now, before, strict=True)]


def _ms(counts: Sequence[float], share: float) -> float | None:
    seconds = quantile(counts, SECONDS, share)
    return None if seconds is None else round(1e3 * seconds, 1)
