"""The words in which boards are written: a board has rows, a row has panels, a panel has queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WINDOW = "$__rate_interval"  # Grafana's: four scrapes at least


@dataclass(frozen=True)
class Query:
    """A query in PromQL, and the name of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    about: str = ""
    kind: Literal["lines", "stacked", "number"] = "lines"
    width: int = 8  # of 24
    most: float | None = None  # of the axis
    bad_above: float | None = None  # a number turns red
    bad_below: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels under one title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """A dashboard; `name` is its file's, and its id in Grafana."""

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]


def lines(
    title: str, *queries: tuple[str, str], unit: str = "short", about: str = "", width: int = 8
) -> Panel:
    """Return a panel of lines; each query is an expression and the name of its lines."""
    return Panel(title, tuple(Query(*one) for one in queries), unit, about, width=width)


def stacked(
    title: str, *queries: tuple[str, str], unit: str = "short", about: str = "", width: int = 8
) -> Panel:
    """Return a panel of areas that add up."""
    return Panel(title, tuple(Query(*one) for one in queries), unit, about, "stacked", width)


def number(
    title: str,
    expr: str,
    unit: str = "short",
    about: str = "",
    *,
    bad_above: float | None = None,
    bad_below: float | None = None,
) -> Panel:
    """Return a panel of one number, which turns red where it is bad."""
    return Panel(title, (Query(expr),), unit, about, "number", 4, bad_above=bad_above, bad_below=bad_below)


def rate(name: str, by: str = "", window: str = WINDOW) -> str:
    """Return the sum of a counter's rates, by labels."""
    return f"sum{_by(by)}(rate({name}[{window}]))"


def mean(histogram: str, by: str = "") -> str:
    """Return the mean of what a histogram observed."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def quantile(share: float, histogram: str, by: str = "", select: str = "") -> str:
    """Return a quantile of a histogram, by labels."""
    every = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({every}) (rate({histogram}_bucket{select}[{WINDOW}])))"


def quantiles(histogram: str, by: str = "", select: str = "") -> tuple[tuple[str, str], ...]:
    """Return queries of the median and the 99th percentile."""
    label = "".join(f" {{{{{one.strip()}}}}}" for one in by.split(",") if one)
    return tuple(
        (quantile(share, histogram, by, select), f"{name}{label}")
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    )


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
