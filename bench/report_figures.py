"""The figures of docs/benchmarks.md: what they show, as data, and how they are drawn.

Each figure is two SVG files, for a light and for a dark page. Their text stays text, so a viewer's own fonts
draw it. A file carries a digest of the data it was drawn from: with another version of matplotlib its bytes
may differ, while what it shows is the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from harness.support import ROOT

FOLDER = ROOT / "docs" / "figures"


@dataclass(frozen=True)
class Panel:
    """One chart. `series` maps a name to its values, one for each label; nan leaves a gap."""

    title: str
    labels: list[str]
    series: dict[str, list[float]]
    axis: str  # what the values are, with their unit
    kind: Literal["bars", "stacked", "lines", "steps"] = "bars"  # steps: labels are numbers
    log: bool = False  # a logarithmic axis for the values
    labels_axis: str = ""  # what the labels of lines are
    goal: float | None = None


@dataclass(frozen=True)
class Figure:
    """Charts side by side, `columns` in a row, with one legend."""

    name: str  # of its files
    alt: str  # what it shows, for those who cannot see it
    panels: list[Panel]
    columns: int = 2

    @property
    def digest(self) -> str:
        """The mark of the data in the figure's files."""
        data = json.dumps(asdict(self), sort_keys=True)
        return f"data {sha256(data.encode()).hexdigest()[:16]}"

    def markdown(self, folder: str) -> str:
        """Show the figure on a page from which its files are in `folder`."""
        return (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}/{self.name}-dark.svg">'
            f'<img alt="{self.alt}" src="{folder}/{self.name}.svg"></picture>\n'
        )


@dataclass(frozen=True)
class _Theme:
    suffix: str
    text: str
    faint: str
    series: tuple[str, ...]  # colours; the first one is Baton's where it is compared


_THEMES = (
    _Theme("", "#1f2328", "#d0d7de", ("#1f6feb", "#9aa4b2", "#d97706", "#0f9d8a", "#8b5cf6")),
    _Theme("-dark", "#e6edf3", "#3d444d", ("#58a6ff", "#8b949e", "#f0a33f", "#3fc7b0", "#b392f0")),
)


def draw(figures: list[Figure], folder: Path = FOLDER) -> None:
    """Write the files of these figures into the folder, and remove all others from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for figure in figures:
        for theme in _THEMES:
            _draw(figure, theme, folder / f"{figure.name}{theme.suffix}.svg")


def differences(figures: list[Figure], folder: Path = FOLDER) -> list[str]:
    """Name the files that are missing, show other data, or belong to no figure."""
    expected = {f"{one.name}{theme.suffix}.svg": one.digest for one in figures for theme in _THEMES}
    there = {path.name: path for path in folder.glob("*.svg")}
    return sorted(
        name
        for name in expected.keys() | there.keys()
        if name not in expected or name not in there or expected[name] not in there[name].read_text()
    )


def _draw(figure: Figure, theme: _Theme, file: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    style = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
        "font.size": 9,
        "axes.titlesize": 10,
        "svg.fonttype": "none",
        "svg.hashsalt": "baton",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": theme.faint,
        "grid.color": theme.faint,
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
        "axes.axisbelow": True,
    }
    columns = min(figure.columns, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    with mpl.rc_context(style):
        canvas = Canvas(figsize=(8.6, 0.5 + rows * max(map(_height, figure.panels))), layout="constrained")
        for number, panel in enumerate(figure.panels, 1):
            axes = canvas.add_subplot(rows, columns, number)
            axes.set_title(panel.title, loc="left")
            {"lines": _lines, "steps": _steps}.get(panel.kind, _bars)(axes, panel, theme)
        handles: dict[str, Any] = {}
        for axes in canvas.axes:
            handles.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if len(handles) > 1:
            names = list(handles)
            canvas.legend(
                [handles[name] for name in names],
                names,
                loc="outside lower center",
                ncols=len(names),
                frameon=False,
            )
        # Neither a date nor a version: they would change the file where the figure stays the same.
        metadata = {"Date": None, "Creator": None, "Title": figure.alt, "Description": figure.digest}
        canvas.savefig(file, format="svg", transparent=True, metadata=metadata)
    file.write_text("\n".join(line.rstrip() for line in file.read_text().splitlines()) + "\n")


def _height(panel: Panel) -> float:
    """Return the height of a chart in inches."""
    if panel.kind in ("lines", "steps"):
        return 2.3
    bars = len(panel.labels) * (1 if panel.kind == "stacked" else len(panel.series))
    return 0.75 + 0.17 * bars + 0.1 * len(panel.labels)


def _bars(axes: Any, panel: Panel, theme: _Theme) -> None:
    """Draw horizontal bars from the top down: side by side in a group for each label, or stacked."""
    stacked = panel.kind == "stacked"
    thick = 0.7 if stacked else 0.8 / len(panel.series)
    so_far = [0.0] * len(panel.labels)
    for number, (name, values) in enumerate(panel.series.items()):
        shift = 0.0 if stacked else (number - (len(panel.series) - 1) / 2) * thick
        places = [place + shift for place in range(len(panel.labels))]
        bars = axes.barh(
            places, values, thick, so_far if stacked else 0, color=theme.series[number], label=name
        )
        if stacked:
            so_far = [before + value for before, value in zip(so_far, values, strict=True)]
        if not stacked or number == len(panel.series) - 1:
            axes.bar_label(
                bars, [_short(value) for value in (so_far if stacked else values)], padding=2, size=8
            )
    axes.set_yticks(range(len(panel.labels)), panel.labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(panel.axis)
    axes.grid(axis="x", linewidth=0.5)
    if panel.log:
        axes.set_xscale("log")
    axes.margins(x=0.16)
    if panel.goal is not None:
        axes.axvline(panel.goal, color=theme.text, linestyle="--", linewidth=1, label="goal")


def _lines(axes: Any, panel: Panel, theme: _Theme) -> None:
    for number, (name, values) in enumerate(panel.series.items()):
        axes.plot(panel.labels, values, marker="o", markersize=4, color=theme.series[number], label=name)
    axes.set_ylabel(panel.axis)
    axes.set_xlabel(panel.labels_axis)
    axes.grid(axis="y", linewidth=0.5)
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _steps(axes: Any, panel: Panel, theme: _Theme) -> None:
    """Draw values that stay until the next one."""
    places = [float(label) for label in panel.labels]
    for number, (name, values) in enumerate(panel.series.items()):
        axes.step(places, values, where="post", color=theme.series[number], label=name)
    axes.set_ylabel(panel.axis)
    axes.set_xlabel(panel.labels_axis)
    axes.grid(axis="y", linewidth=0.5)
    axes.set_ylim(bottom=0)


def _short(value: float) -> str:
    """Return a value with at most three digits that matter."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
