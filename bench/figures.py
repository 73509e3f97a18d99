"""The figures of README and docs/benchmarks.md, each as two SVG files, for a light and for a dark page.

A file carries a digest of its data: with another version of matplotlib its bytes may differ, while what it
shows is the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from harness.stats import RESULTS
from harness.support import ROOT

FOLDER = ROOT / "docs" / "figures"
# By file suffix: the text's colour, that of lines in the background, and those of two series, Baton's first.
_THEMES = {
    "": ("#1f2328", "#d0d7de", ("#1f6feb", "#9aa4b2")),
    "-dark": ("#e6edf3", "#3d444d", ("#58a6ff", "#8b949e")),
}


@dataclass(frozen=True)
class Figure:
    """Charts side by side that compare two arms of a result: lines by load, or bars."""

    name: str  # also of the result's file, where `file` is empty
    alt: str
    path: tuple[str, ...]  # to the arms or, of lines, to the loads
    arms: dict[str, str]  # name shown: key
    charts: dict[str, Sequence[str]]  # title: keys of the figures
    file: str = ""
    axis: str = ""  # of lines

    def data(self) -> list[tuple[str, list[str], dict[str, list[float]]]]:
        """Return each chart's title, labels and series."""
        node = json.loads((RESULTS / f"{self.file or self.name}.json").read_text())
        for key in self.path:
            node = node[key]
        if self.axis:
            return [
                (
                    title,
                    list(node),
                    {name: [loads[arm][key] for loads in node.values()] for name, arm in self.arms.items()},
                )
                for title, (key,) in self.charts.items()
            ]
        return [
            (title, list(keys), {name: [node[arm][key] for key in keys] for name, arm in self.arms.items()})
            for title, keys in self.charts.items()
        ]

    @property
    def digest(self) -> str:
        return f"data {sha256(json.dumps([self.alt, self.data()]).encode()).hexdigest()[:16]}"

    def markdown(self, folder: str) -> str:
        """Show the figure on a page from which its files are in `folder`."""
        return (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}/{self.name}-dark.svg">'
            f'<img alt="{self.alt}" src="{folder}/{self.name}.svg"></picture>'
        )


LONGEST_GAP = Figure(
    "longest-gap",
    "Gap between a stream's tokens while long prompts arrive: 1P1D against two aggregated engines",
    ("median",),
    {"1P1D (Baton)": "1P1D", "2 aggregated engines": "2 aggregated"},
    {
        "Gap between a stream's tokens while long prompts arrive, ms": (
            "itl_p50_ms",
            "itl_p99_ms",
            "itl_max_ms",
        )
    },
    file="disaggregation",
)
CLIENTS = Figure(
    "clients",
    "vllm bench serve against Baton and against stock vLLM, by concurrency",
    ("tools", "serve", "median"),
    {"Baton, 1P1D": "baton", "stock vLLM": "stock"},
    {
        "Output tokens/s": ("tokens_per_s",),
        "Time to first token, p50, ms": ("ttft_p50_ms",),
        "Inter-token latency, p50, ms": ("itl_p50_ms",),
        "Inter-token latency, p99, ms": ("itl_p99_ms",),
    },
    axis="concurrent requests",
)
ALL = (LONGEST_GAP, CLIENTS)
_BARS = {"itl_p50_ms": "p50", "itl_p99_ms": "p99", "itl_max_ms": "longest"}


def draw(all_: Sequence[Figure] = ALL, folder: Path = FOLDER) -> None:
    """Write the files of these figures into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for figure in all_:
        for suffix, (text, faint, colours) in _THEMES.items():
            _draw(figure, folder / f"{figure.name}{suffix}.svg", text, faint, colours)


def differences(all_: Sequence[Figure] = ALL, folder: Path = FOLDER) -> list[str]:
    """Name the files that are missing, show other data, or belong to no figure."""
    expected = {f"{one.name}{suffix}.svg": one.digest for one in all_ for suffix in _THEMES}
    there = {path.name: path.read_text() for path in folder.glob("*.svg")}
    return sorted(
        name
        for name in expected.keys() | there.keys()
        if name not in expected or expected[name] not in there.get(name, "")
    )


def _draw(figure: Figure, file: Path, text: str, faint: str, colours: Sequence[str]) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    colour = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), text)
    style: dict[str, Any] = {
        **colour,
        **dict.fromkeys(("axes.edgecolor", "grid.color"), faint),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.axisbelow": True,
        "svg.fonttype": "none",  # text stays text, which a viewer's own fonts draw
        "svg.hashsalt": "baton",
    }
    charts = figure.data()
    rows, columns = -(-len(charts) // 2), min(2, len(charts))
    with mpl.rc_context(style):
        canvas = Canvas(figsize=(8.6, 0.5 + 2.3 * rows), layout="constrained")
        for number, (title, labels, series) in enumerate(charts, 1):
            axes = canvas.add_subplot(rows, columns, number)
            axes.set_title(title, loc="left")
            (_lines if figure.axis else _bars)(axes, labels, series, colours)
            axes.set_xlabel(figure.axis)
        handles, names = canvas.axes[0].get_legend_handles_labels()
        canvas.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
        # Neither a date nor a version: they would change the file where the figure stays the same.
        metadata = {"Date": None, "Creator": None, "Title": figure.alt, "Description": figure.digest}
        canvas.savefig(file, format="svg", transparent=True, metadata=metadata)
    file.write_text("\n".join(line.rstrip() for line in file.read_text().splitlines()) + "\n")


def _bars(axes: Any, labels: list[str], series: dict[str, list[float]], colours: Sequence[str]) -> None:
    thick = 0.8 / len(series)
    for number, ((name, values), colour) in enumerate(zip(series.items(), colours, strict=True)):
        places = [place + (number - (len(series) - 1) / 2) * thick for place in range(len(labels))]
        bars = axes.barh(places, values, thick, color=colour, label=name)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=2, size=8)
    axes.set_yticks(range(len(labels)), [_BARS.get(label, label) for label in labels])
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.5)
    axes.margins(x=0.16)


def _lines(axes: Any, labels: list[str], series: dict[str, list[float]], colours: Sequence[str]) -> None:
    for (name, values), colour in zip(series.items(), colours, strict=True):
        axes.plot(labels, values, marker="o", markersize=4, color=colour, label=name)
    axes.grid(axis="y", linewidth=0.5)
    if max(map(max, series.values())) > 100 * min(map(min, series.values())):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
