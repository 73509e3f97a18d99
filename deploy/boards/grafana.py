"""Convert boards to Grafana's JSON, with its foundation SDK."""

from __future__ import annotations

import itertools
import json
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as words
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
)

from deploy.boards.model import Board, Panel, Query

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
HEIGHT = 8
NUMBER_HEIGHT = 4
_TAG = "baton"


def to_json(board: Board) -> str:
    """Return a board's JSON file."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.name)
        .description(board.about)
        .tags([_TAG])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .editable()
        .link(
            dashboard.DashboardLink("Baton")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    )
    numbers = itertools.count(1)
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            one = _number(panel) if panel.kind == "number" else _lines(panel)
            made = made.with_panel(one.id(next(numbers)))
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(made.build())), indent=1) + "\n"


def _lines(panel: Panel) -> Any:
    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(words.LegendDisplayMode.LIST)
        .placement(words.LegendPlacement.BOTTOM)
    )
    made = timeseries.Panel().legend(legend).fill_opacity(10)
    if panel.kind == "stacked":
        made = made.fill_opacity(40).stacking(
            common.StackingConfig().mode(words.StackingMode.NORMAL).group("A")
        )
    return _common(made, panel, HEIGHT)


def _number(panel: Panel) -> Any:
    made = stat.Panel().color_mode(words.BigValueColorMode.BACKGROUND)
    made = made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    steps = [Threshold(value=None, color="green")]
    if panel.bad_above is not None:
        steps.append(Threshold(value=panel.bad_above, color="red"))
    if panel.bad_below is not None:
        steps = [Threshold(value=None, color="red"), Threshold(value=panel.bad_below, color="green")]
    limits = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
    return _common(made.thresholds(limits), panel, NUMBER_HEIGHT)


def _common(made: Any, panel: Panel, height: int) -> Any:
    made = made.title(panel.title).unit(panel.unit).datasource(SOURCE).span(panel.width).height(height)
    if panel.about:
        made = made.description(panel.about)
    for at, query in enumerate(panel.queries):
        made = made.with_target(_query(query, chr(ord("A") + at), instant=panel.kind == "number"))
    return made


def _query(query: Query, ref: str, *, instant: bool) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).ref_id(ref).datasource(SOURCE)
    made = made.instant() if instant else made.range()
    return made.legend_format(query.legend) if query.legend else made
