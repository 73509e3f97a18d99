"""Write a run's figures to a file and to the tables of docs/reliability.md."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import stats
from harness.chaos.outcome import Outcome, as_json
from harness.chaos.placing_judge import Placed
from harness.support import ROOT

RESULTS = stats.RESULTS / "chaos.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def save(file: Path, outcomes: Sequence[Outcome | Placed]) -> None:
    plans = [as_json(one) for one in outcomes if isinstance(one, Outcome)]
    placements = [as_json(one) for one in outcomes if isinstance(one, Placed)]
    stats.save(file.stem, {"plans": plans, "placements": placements}, file.parent)


def write(file: Path, page: Path = PAGE) -> Path:
    """Write a run's tables between the page's markers. Raises ValueError if they are missing."""
    text = page.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no {BEGIN} ... {END}")
    page.write_text(f"{head}{BEGIN}\n{tables(json.loads(file.read_text()))}{END}{tail}")
    return page


def tables(result: dict[str, Any]) -> str:
    """Return Markdown: a line about the run, a table of its plans, and a line per placing plan."""
    machine, plans, placements = result["machine"], result["plans"], result.get("placements", [])
    both = [*plans, *placements]
    faults = sum(sum(one["faults"].values()) for one in both)
    minutes = sum(one["seconds"] for one in both) / 60
    lines = [_HEAD, ["---"] * len(_HEAD), *map(_row, plans)]
    return "\n".join(
        [
            f"\n{faults} faults in {minutes:.1f} minutes; {machine['cores']} cores ({machine['cpu']}), "
            f"{machine['when']}.\n",
            *("| " + " | ".join(map(str, line)) + " |" for line in lines),
            "",
            *map(_placements, placements),
        ]
    )


_HEAD = ["plan", "requests", "failed, wrong or left over", "longest pause, s", "pauses beyond the limit"]


def _row(plan: dict[str, Any]) -> list[Any]:
    failed = plan["failed"] + plan["refused_needlessly"] + len(plan["crashes"]) + len(plan["unhealed"])
    left = sum(plan["leaks"][key] for key in ("blocks", "attempts", "reservations", "pinned"))
    bad = failed + plan["wrong"] + left
    pause = f"{plan['longest_covered_pause_s']:.2f}"
    return [plan["plan"], plan["requests"], bad, pause, plan["over_limit"]]


def _placements(one: dict[str, Any]) -> str:
    failed = one["failed"] + len(one["crashes"]) + len(one["unhealed"])
    left = one["left"]["attempts"] + one["left"]["requests"]
    text = (
        f"`{one['plan']}`: {one['requests']} requests, {one['placed']} attempts placed, {one['alone']} of"
        f" them by routers alone; {failed} failed, {one['twice']} placed twice, {one['sent_back']} sent back"
        f" by a full worker, {left} left over, {one['unlike']} of {one['compared']} comparisons of schedulers"
        f" differ. A placement takes {_times(one['calm'])} ms (p50, p99, maximum), during faults"
        f" {_times(one['disturbed'])} ms."
    )
    return textwrap.fill(text, 110, break_on_hyphens=False) + "\n"


def _times(took: dict[str, float]) -> str:
    return ", ".join(f"{took[key]:.0f}" for key in ("p50_ms", "p99_ms", "max_ms"))
