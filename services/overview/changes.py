"""Describe the changes of workers between two snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton.services.overview.workers import GONE, Row

_SHOWN = 5  # workers named in one line
# Severities, shown as colours.
INFO, WARNING, BAD = "info", "warning", "bad"

Rows = Mapping[str, Row]  # id -> row


def changes(before: Rows, now: Rows) -> Iterator[tuple[str, str]]:
    """Yield each change's severity and text."""
    there = [row for row in now.values() if row.state != GONE]
    if came := [row for row in there if row.id not in before]:
        yield INFO, f"{_names(came)} registered"
    lost = [row for row in now.values() if row.state == GONE and row.id in before]
    if gone := [row for row in lost if before[row.id].state != GONE]:
        yield BAD, f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone"
    for row in there:
        if row.id in before:
            yield from _changed(before[row.id], row)


def _changed(before: Row, row: Row) -> Iterator[tuple[str, str]]:
    for column, one, other in (("role", before.role, row.role), ("state", before.state, row.state)):
        if one not in {other, GONE}:
            yield INFO, f"{row.name}: {column} {one} → {other}"
    if row.alarm != before.alarm:
        text = "accepts fewer drafts than it should" if row.alarm else "accepts drafts as it should again"
        yield BAD if row.alarm else INFO, f"{row.name} {text}"


def _names(rows: Sequence[Row]) -> str:
    more = len(rows) - _SHOWN
    return ", ".join(row.name for row in rows[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
