"""Read boards.yaml: a board has rows, a row has panels, a panel has queries."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

WINDOW = "$__rate_interval"  # Grafana's variable; at least four scrapes
_MACRO = re.compile(r"(RATE|MEAN|QUANTILE)\(([^()]*)\)")


@dataclass(frozen=True)
class Query:
    """A query in PromQL, and the legend of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    kind: Literal["lines", "stacked", "number"] = "lines"
    unit: str = "short"
    about: str = ""
    width: int
    bad_above: float | None = None
    bad_below: float | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """A dashboard. `name` is its file name and its id in Grafana."""

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]


def boards() -> list[Board]:
    found = yaml.safe_load(Path(__file__).with_name("boards.yaml").read_text())
    return [
        Board(
            one["name"],
            one["title"],
            one["about"],
            tuple(Row(title, tuple(map(_panel, panels))) for title, panels in one["rows"].items()),
        )
        for one in found
    ]


def _panel(fields: dict[str, Any]) -> Panel:
    written = fields.pop("queries", None) or {"": fields.pop("query")}
    queries = tuple(Query(_MACRO.sub(_expanded, expr), legend) for legend, expr in written.items())
    width = 4 if fields.get("kind") == "number" else 8
    return Panel(queries=queries, **{"width": width, **fields})


def _expanded(macro: re.Match[str]) -> str:
    first, *more = (part.strip() for part in macro[2].split(";"))
    match macro[1]:
        case "QUANTILE":
            histogram, by = more[0], ", ".join(["le", *more[1:]])
            return f"histogram_quantile({first}, sum by ({by}) (rate({histogram}_bucket[{WINDOW}])))"
        case "MEAN":
            return f"{_rate(f'{first}_sum', *more)} / {_rate(f'{first}_count', *more)}"
        case _:
            return _rate(first, *more)


def _rate(counter: str, labels: str = "") -> str:
    return f"sum{f' by ({labels}) ' if labels else ''}(rate({counter}[{WINDOW}]))"
