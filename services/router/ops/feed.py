"""One message for all watchers of the live page, encoded once per tick while there are any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import msgspec

from baton.protos import scheduler_pb2 as pb
from baton.services.overview import workers
from baton.services.overview.workers import Workers
from baton.services.router.ops import series
from baton.services.router.ops.events import Events
from baton.services.router.ops.flows import Flows
from baton.services.router.ops.series import Series
from baton.services.router.record import Record

SAMPLE_S = 1.0
MOST_WATCHERS = 32


class TooManyWatchers(Exception):
    """The page already has the maximum number of watchers."""


class Feed:
    """The page's state, and its watchers."""

    def __init__(
        self,
        about: Mapping[str, Any],
        workers: Callable[[], Iterable[pb.WorkerStatus]],
        scheduler_problem: Callable[[], str],
        series: Series,
        tick_s: float = 0.5,
    ) -> None:
        """Send a message every `tick_s` while there are watchers. Samples are taken every second anyway.

        about: constants, such as model, topic and versions; scheduler_problem: returns "" while one answers
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
                "series_columns": series.COLUMNS,
                "series": kept,
                "sample_s": SAMPLE_S,
            }
        )

    async def run(self) -> None:
        """Sample and send forever."""
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
