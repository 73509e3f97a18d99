"""Tables that fit a terminal: the least important columns are dropped, and no cell is ever cut."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

Row = TypeVar("Row")
UNLIMITED = 10_000  # terminal columns
_MEASURING = Console(width=UNLIMITED, file=io.StringIO())


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column of a table. Rank 0 is never dropped; the lowest other rank is dropped first."""

    title: str
    cell: Callable[[Row], str]
    number: bool = False
    rank: int = 0


def fitted(title: str, columns: Iterable[Column[Row]], rows: Iterable[Row], width: int) -> Table:
    """Return a table of at most `width` terminal columns, if dropping columns can achieve that."""
    left, rows = list(columns), list(rows)
    while True:
        table = _table(title, left, rows)
        spare = [column for column in left if column.rank]
        if not spare or needed(table) <= width:
            return table
        left.remove(min(spare, key=lambda column: column.rank))


def needed(table: Table) -> int:
    """Return the width, in terminal columns, at which no cell of `table` is cut."""
    return Measurement.get(_MEASURING, _MEASURING.options, table).maximum


def _table(title: str, columns: list[Column[Row]], rows: list[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.number else "left", no_wrap=True, vertical="top"
        )
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table
