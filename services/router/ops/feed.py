"""One message for all watchers of the live page, encoded once per tick while there are watchers.

It has the workers, the KV moved between them in the last ten seconds, recent events in words, and the
latest sample. Samples are taken every second, each covers the ten seconds before it, and a page first gets
those of the last quarter of an hour.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.autoscale.histogram import SECONDS, quantile
from baton.autoscale.loads import increase
from baton.protos import scheduler_pb2 as pb
from baton.services.overview import workers
from baton.services.overview.workers import BAD, INFO, WARNING, Row, Sums, Workers, changes
from baton.services.router.record import Record

KEPT_SAMPLES = 900  # a quarter of an hour
WINDOW = 10  # samples
SERIES_COLUMNS = (
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
        """`load`: this router's request counts; `live`: the number of requests waiting or running."""
        self._load = load
        self._live = live
        self._now_s = now_s
        self._window: deque[tuple[float, pb.RouterLoad]] = deque(maxlen=WINDOW + 1)
        self.samples: deque[list[Any]] = deque(maxlen=KEPT_SAMPLES)

    def sample(self, sums: Sums) -> list[Any]:
        """Take a sample, which costs about 250 additions."""
        now = self._now_s()
        load = self._load()
        self._window.append((now, load))
        then, before = self._window[0]
        took = max(now - then, 1e-9)
        new = increase(load, before)
        one = [
            round(now, 2),
            _ms(new.first_token, 0.5),
            _ms(new.first_token, 0.99),
            _ms(new.gap, 0.5),
            _ms(new.gap, 0.99),
            round(new.over / took, 2) if len(self._window) > 1 else 0.0,
            load.waiting,
            self._live(),
            sums.output_tokens_per_s,
            sums.prefill_tokens_per_s,
            sums.acceptance,
        ]
        self.samples.append(one)
        return one


def _ms(counts: Sequence[float], share: float) -> float | None:
    seconds = quantile(counts, SECONDS, share)
    return None if seconds is None else round(1e3 * seconds, 1)


KEPT_EVENTS = 300


class Events:
    """The last events, each [number, Unix time in s, severity, text], numbered consecutively."""

    def __init__(self) -> None:
        self._number = 0
        self._kept: deque[list[Any]] = deque(maxlen=KEPT_EVENTS)
        self._workers: dict[str, Row] | None = None  # rows by id; None before the first snapshot
        self._problem: str | None = None  # None before a scheduler has answered

    def add(self, severity: str, text: str) -> None:
        self._number += 1
        self._kept.append([self._number, round(time.time(), 2), severity, text])

    def after(self, number: int) -> list[list[Any]]:
        """Return the events after this number, oldest first."""
        return [one for one in self._kept if one[0] > number]

    def scheduler(self, problem: str) -> None:
        """Record whether a scheduler answers: `problem` is empty if one does."""
        if self._problem is None and problem:
            return  # no scheduler has answered yet
        if self._problem is not None and bool(problem) != bool(self._problem):
            text = f"no scheduler answers: {problem}" if problem else "a scheduler answers again"
            self.add(BAD if problem else INFO, text)
        self._problem = problem

    def workers(self, rows: Iterable[Row]) -> None:
        before, self._workers = self._workers, {row.id: row for row in rows}
        for severity, text in changes(before, self._workers) if before is not None else ():
            self.add(severity, text)

    def over(self, record: Record) -> None:
        """Record a request that lost a worker or failed."""
        if not record.retried and not record.failed:
            return
        troubles = [
            f"{one.name}: {one.attributes.get('message') or one.attributes.get('trouble') or ''}"
            for one in record.events
        ]
        text = f"request {record.request_id} {record.outcome} after {len(record.attempts)} attempts"
        self.add(
            BAD if record.failed else WARNING, f"{text}; {'; '.join(troubles[-3:])}" if troubles else text
        )


WINDOW_S = 10.0
MOST_PAIRS = 200  # the busiest ones, in one message
_PART_S = 1.0
_MIB = 1 << 20

Pair = tuple[str, str]  # prefill worker, decode worker; the same worker if it did both


@dataclass(slots=True)
class _Part:
    since: float
    requests: Counter[Pair] = field(default_factory=Counter)
    moved: Counter[Pair] = field(default_factory=Counter)  # bytes


class Flows:
    """Sums by pair and second; memory is bounded by the pairs used in the window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: deque[_Part] = deque()

    def add(self, record: Record) -> None:
        """Count a finished request for the workers of its last attempt."""
        if not record.attempts:
            return
        now = self._clock()
        if not self._parts or now >= self._parts[-1].since + _PART_S:
            self._forget(now)
            self._parts.append(_Part(now))
        last = record.attempts[-1]
        pair = last.prefill_worker or last.decode_worker, last.decode_worker
        self._parts[-1].requests[pair] += 1
        moved = sum(stage.attributes.get("bytes", 0) for stage in record.later if stage.name == "handoff")
        self._parts[-1].moved[pair] += moved

    def rows(self) -> list[list[Any]]:
        """Return [prefill worker, decode worker, requests/s, MiB/s] for each pair, the busiest first."""
        self._forget(self._clock())
        requests: Counter[Pair] = Counter()
        moved: Counter[Pair] = Counter()
        for part in self._parts:
            requests.update(part.requests)
            moved.update(part.moved)
        return [
            [*pair, round(requests[pair] / WINDOW_S, 2), round(moved[pair] / WINDOW_S / _MIB, 2)]
            for pair, _ in requests.most_common(MOST_PAIRS)
        ]

    def _forget(self, now: float) -> None:
        while self._parts and self._parts[0].since <= now - WINDOW_S:
            self._parts.popleft()


SAMPLE_S = 1.0
MOST_WATCHERS = 32


class TooManyWatchers(Exception):
    """The page already has the maximum number of watchers."""


class Feed:
    def __init__(
        self,
        about: Mapping[str, Any],
        workers: Callable[[], Iterable[pb.WorkerStatus]],
        scheduler_problem: Callable[[], str],
        series: Series,
        tick_s: float = 0.5,
    ) -> None:
        """Send a message every `tick_s` while there are watchers. Samples are always taken every second.

        about: constants, such as model and versions; scheduler_problem: returns "" while a scheduler answers
        """
        self._about = about
        self._statuses = workers
        self._scheduler_problem = scheduler_problem
        self._series = series
        self._tick_s = tick_s
        self.workers = Workers()
        self.flows = Flows()
        self.events = Events()
        self._watchers: set[asyncio.Event] = set()
        self._message = b""

    def over(self, record: Record) -> None:
        self.flows.add(record)
        self.events.over(record)

    def first(self) -> bytes:
        """Return what a page needs before its first message."""
        kept = list(self._series.samples)
        return msgspec.json.encode(
            {
                "about": self._about,
                "columns": workers.COLUMNS,
                "series_columns": SERIES_COLUMNS,
                "series": kept,
                "sample_s": SAMPLE_S,
            }
        )

    async def run(self) -> None:
        each = max(1, round(SAMPLE_S / self._tick_s))  # ticks per sample
        number = 0
        while True:
            if number % each == 0:
                self._look()
                self._series.sample(self.workers.sums)
            if self._watchers:
                self._message = self._encode()
                for fresh in self._watchers:
                    fresh.set()
            number += 1
            await asyncio.sleep(self._tick_s)

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield each message; a slow watcher skips messages. Raises TooManyWatchers."""
        if len(self._watchers) >= MOST_WATCHERS:
            raise TooManyWatchers
        fresh = asyncio.Event()
        self._watchers.add(fresh)
        try:
            yield self._encode()
            while True:
                await fresh.wait()
                fresh.clear()
                yield self._message
        finally:
            self._watchers.discard(fresh)

    def _look(self) -> None:
        problem = self._scheduler_problem()
        self.workers.update(self._statuses(), fresh=not problem)
        self.events.workers(self.workers.rows)
        self.events.scheduler(problem)

    def _encode(self) -> bytes:
        samples = self._series.samples
        return msgspec.json.encode(
            {
                "workers": self.workers.rows,
                "flows": self.flows.rows(),
                "sample": samples[-1] if samples else None,
                "events": self.events.after(0)[-50:],
                "scheduler": self._scheduler_problem(),
            }
        )
