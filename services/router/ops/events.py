"""Recent changes in words: a bounded list for the live page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from baton.services.router.ops.fleet import COLUMNS, GONE
from baton.services.router.record import Record

KEPT = 300
_AT = {name: index for index, name in enumerate(COLUMNS)}
_SHOWN = 5  # workers named in an event of many
# Severity of an event, for its colour.
INFO, WARNING, BAD = "info", "warning", "bad"


class Events:
    """The last events, each [number, seconds since 1970, severity, text]. Numbers only grow."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._number = 0
        self._kept: deque[list[Any]] = deque(maxlen=KEPT)
        self._workers: dict[str, Sequence[Any]] | None = None  # rows by id; None before the first snapshot
        self._problem: str | None = None  # None before a scheduler has answered

    def add(self, severity: str, text: str) -> None:
        """Add an event."""
        self._number += 1
        self._kept.append([self._number, round(self._now_s(), 2), severity, text])

    def after(self, number: int) -> list[list[Any]]:
        """Return the events above a number, the oldest first."""
        return [one for one in self._kept if one[0] > number]

    def scheduler(self, problem: str) -> None:
        """Note whether a scheduler answers: `problem` is empty while one does."""
        if self._problem is None and problem:
            return  # no scheduler was asked yet
        if self._problem is not None and bool(problem) != bool(self._problem):
            text = f"no scheduler answers: {problem}" if problem else "a scheduler answers again"
            self.add(BAD if problem else INFO, text)
        self._problem = problem

    def fleet(self, rows: Iterable[Sequence[Any]]) -> None:
        """Compare the workers with those of the last call."""
        now = {row[0]: row for row in rows}
        before, self._workers = self._workers, now
        if before is None:
            return
        came = [
            row for worker_id, row in now.items() if worker_id not in before and row[_AT["state"]] != GONE
        ]
        if came:
            self.add(INFO, f"{_names(came)} registered")
        gone = [row for worker_id, row in now.items() if _left(before.get(worker_id), row)]
        if gone:
            self.add(BAD, f"{_names(gone)} gone")
        for worker_id, row in now.items():
            if worker_id in before and row[_AT["state"]] != GONE:
                self._changed(before[worker_id], row)

    def over(self, record: Record) -> None:
        """Note a request that lost a worker, or failed."""
        if not record.retried and not record.failed:
            return
        troubles = [f"{one.name}: {_said(one.attributes)}" for one in record.events]
        text = f"request {record.request_id} {record.outcome} after {len(record.attempts)} attempts"
        self.add(
            BAD if record.failed else WARNING, f"{text}; {'; '.join(troubles[-3:])}" if troubles else text
        )

    def _changed(self, before: Sequence[Any], row: Sequence[Any]) -> None:
        name = row[_AT["name"]]
        for column in ("role", "state"):
            one, other = before[_AT[column]], row[_AT[column]]
            if one not in {other, GONE}:
                self.add(INFO, f"{name}: {column} {one} → {other}")
        if row[_AT["alarm"]] != before[_AT["alarm"]]:
            alarmed = row[_AT["alarm"]]
            text = "accepts fewer drafts than it should" if alarmed else "accepts drafts as it should again"
            self.add(BAD if alarmed else INFO, f"{name} {text}")


def _left(before: Sequence[Any] | None, row: Sequence[Any]) -> bool:
    return row[_AT["state"]] == GONE and before is not None and before[_AT["state"]] != GONE


def _names(rows: Sequence[Sequence[Any]]) -> str:
    names = [str(row[_AT["name"]]) for row in rows[:_SHOWN]]
    more = len(rows) - len(names)
    said = ", ".join(names) + (f" and {more} more" if more else "")
    return f"{said} {'is' if len(rows) == 1 else 'are'}" if rows[0][_AT["state"]] == GONE else said


def _said(attributes: Any) -> str:
    return str(attributes.get("message") or attributes.get("trouble") or "")
