"""Draw README's figure, the gaps between tokens in 1P1D and in aggregated engines, as SVG for both themes."""

from __future__ import annotations

import json
from pathlib import Path

from harness.stats import RESULTS
from harness.support import ROOT

FOLDER = ROOT / "docs" / "figures"
TITLE = "Gap between a stream's tokens while long prompts arrive"
ALT = f"{TITLE}: 1P1D against two aggregated engines"
ARMS = {"1P1D (Baton)": "1P1D", "2 aggregated engines": "2 aggregated"}
GAPS = {"p50": "itl_p50_ms", "p99": "itl_p99_ms", "longest": "itl_max_ms"}
# File suffix -> colours of the text and of each arm.
THEMES = {"": ("#1f2328", "#1f6feb", "#9aa4b2"), "-dark": ("#e6edf3", "#58a6ff", "#8b949e")}
WIDTH, LEFT, BAR, STEP = 620, 60, 14, 44  # pixels


def markdown(folder: str) -> str:
    """Return the Markdown of the figure. folder: its files, relative to the page."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}/longest-gap-dark.svg">'
        f'<img alt="{ALT}" src="{folder}/longest-gap.svg"></picture>'
    )


def drawn() -> dict[Path, str]:
    """Return the text of each file."""
    median = json.loads((RESULTS / "disaggregation.json").read_text())["median"]
    return {FOLDER / f"longest-gap{suffix}.svg": _svg(median, *colours) for suffix, colours in THEMES.items()}


def _svg(median: dict[str, dict[str, float]], text: str, *colours: str) -> str:
    scale = (WIDTH - LEFT - 50) / max(median[arm][key] for arm in ARMS.values() for key in GAPS.values())
    height = 60 + STEP * len(GAPS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"'
        f' font-size="12" fill="{text}">',
        f"<title>{ALT}</title>",
        f'<text x="{LEFT}" y="16" font-size="14">{TITLE}, ms (less is better)</text>',
    ]
    for row, (gap, key) in enumerate(GAPS.items()):
        top = 30 + STEP * row
        parts.append(f'<text x="{LEFT - 8}" y="{top + BAR + 5}" text-anchor="end">{gap}</text>')
        for number, (arm, colour) in enumerate(zip(ARMS.values(), colours, strict=True)):
            value, y = median[arm][key], top + number * (BAR + 2)
            long = round(scale * value, 1)
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{long}" height="{BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + long + 4}" y="{y + 11}">{value:.0f}</text>')
    for number, (name, colour) in enumerate(zip(ARMS, colours, strict=True)):
        x, y = LEFT + 180 * number, height - 16
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])
