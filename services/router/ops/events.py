"""Recent changes in words: a bounded list for the live page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from baton.services.router.ops.fleet import GONE, Row
from baton.services.router.record import Record

KEPT = 300
_SHOWN = 5  # workers named in one event
# An event's severity, shown as its colour.
INFO, WARNING, BAD = "info", "warning", "bad"


class Events:
    """The last events, each [number, Unix time in s, severity, text], numbered upwards."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._number = 0
        self._kept: deque[list[Any]] = deque(maxlen=KEPT)
        self._workers: dict[str, Row] | None = None  # rows by id; None before the first snapshot
        self._problem: str | None = None  # None before a scheduler has answered

    def add(self, severity: str, text: str) -> None:
        self._number += 1
        self._kept.append([self._number, round(self._now_s(), 2), severity, text])

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

    def fleet(self, rows: Iterable[Row]) -> None:
        """Record how the workers changed since the last call."""
        before, self._workers = self._workers, {row.id: row for row in rows}
        if before is None:
            return
        there = [row for row in self._workers.values() if row.state != GONE]
        if came := [row for row in there if row.id not in before]:
            self.add(INFO, f"{_names(came)} registered")
        lost = [row for row in self._workers.values() if row.state == GONE and row.id in before]
        if gone := [row for row in lost if before[row.id].state != GONE]:
            self.add(BAD, f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone")
        for row in there:
            if row.id in before:
                self._changed(before[row.id], row)

    def over(self, record: Record) -> None:
        """Record a request that lost a worker or failed."""
        if not record.retried and not record.failed:
            return
        troubles = [f"{one.name}: {_said(one.attributes)}" for one in record.events]
        text = f"request {record.request_id} {record.outcome} after {len(record.attempts)} attempts"
        self.add(
            BAD if record.failed else WARNING, f"{text}; {'; '.join(troubles[-3:])}" if troubles else text
        )

    def _changed(self, before: Row, row: Row) -> None:
        for column, one, other in (("role", before.role, row.role), ("state", before.state, row.state)):
            if one not in {other, GONE}:
                self.add(INFO, f"{row.name}: {column} {one} → {other}")
        if row.alarm != before.alarm:
            text = "accepts fewer drafts than it should" if row.alarm else "accepts drafts as it should again"
            self.add(BAD if row.alarm else INFO, f"{row.name} {text}")


def _names(rows: Sequence[Row]) -> str:
    more = len(rows) - _SHOWN
    return ", ".join(row.name for row in rows[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _said(attributes: Any) -> str:
    return str(attributes.get("message") or attributes.get("trouble") or "")
