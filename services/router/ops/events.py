"""Recent changes in words: a bounded list for the live page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from baton.services.overview.changes import BAD, INFO, WARNING, changes
from baton.services.overview.workers import Row
from baton.services.router.record import Record

KEPT = 300


class Events:
    """The last events, each [number, Unix time in s, severity, text], numbered upwards."""

    def __init__(self) -> None:
        self._number = 0
        self._kept: deque[list[Any]] = deque(maxlen=KEPT)
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
            return  # no scheduler has been asked yet
        if self._problem is not None and bool(problem) != bool(self._problem):
            text = f"no scheduler answers: {problem}" if problem else "a scheduler answers again"
            self.add(BAD if problem else INFO, text)
        self._problem = problem

    def workers(self, rows: Iterable[Row]) -> None:
        """Record how the workers changed since the last call."""
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
