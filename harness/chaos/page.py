"""Write a run's figures to a file and to the tables of docs/reliability.md."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
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
    """Return Markdown: a table of the plans, one per placing plan, and lists of faults and hit requests."""
    machine, plans, placements = result["machine"], result["plans"], result.get("placements", [])
    minutes = sum(one["seconds"] for one in [*plans, *placements]) / 60
    faults = _sum([*plans, *placements], "faults")
    stages, retries = (_sum(plans, key) for key in ("stages", "retries"))
    return "\n".join(
        [
            f"\n{sum(faults.values())} faults in {minutes:.1f} minutes; {machine['cores']} cores "
            f"({machine['cpu']}), {machine['when']}.\n",
            _table([_HEAD, ["---"] * len(_HEAD), *map(_row, plans)]),
            *map(_placements, placements),
            _listed("Faults", faults),
            _listed("Requests hit, by the victim's role and the request's stage", stages),
            _listed("Failed attempts by the routers' count", retries),
        ]
    )


_HEAD = [
    *("plan", "fleet", "drafts", "store", "seed", "requests", "failed", "wrong tokens", "blocks left"),
    *("leases left", "longest pause, s", "while a worker could serve, s", "limit, s", "pauses beyond it"),
    *("p99, s", "restarts"),
]


def _row(plan: dict[str, Any]) -> list[Any]:
    left = plan["leaks"]
    return [
        *(plan[key] for key in ("plan", "shape", "speculation", "store", "seed", "requests")),
        plan["failed"] + plan["refused_needlessly"] + len(plan["crashes"]) + len(plan["unhealed"]),
        plan["wrong"],
        left["blocks"],
        left["attempts"] + left["reservations"] + left["pinned"],
        f"{plan['longest_pause_s']:.2f}",
        f"{plan['longest_covered_pause_s']:.2f}",
        f"{plan['pause_limit_s']:.1f}" if plan["pause_limit_s"] else "-",
        plan["over_limit"],
        f"{plan['p99_pause_s']:.2f}",
        plan["restarts"],
    ]


def _placements(one: dict[str, Any]) -> str:
    left = one["left"]
    rows = [
        ["requests, attempts placed", f"{one['requests']}, {one['placed']}"],
        ["placed by routers alone", one["alone"]],
        ["failed", one["failed"] + len(one["crashes"]) + len(one["unhealed"])],
        ["refused as full", one["refused"]],
        ["placed twice", one["twice"]],
        ["sent back by a full worker", one["sent_back"]],
        ["of these placed by routers alone", one["sent_back_alone"]],
        ["fullest worker", f"{one['fullest']:.0%}"],
        ["descriptions of schedulers, with wrong sums", f"{one['compared']}, {one['unlike']}"],
        ["p50, p99, maximum between faults, ms", _times(one["calm"])],
        ["p50, p99, maximum during faults, ms", _times(one["disturbed"])],
        ["attempts left, reservations left", f"{left['attempts']}, {left['requests']}"],
    ]
    load = f"`{one['plan']}`, seed {one['seed']}: {one['rate']} requests/s for {one['seconds']:.0f} s"
    fleet = f"{one['routers']} routers, {one['schedulers']} schedulers over Redis, {one['workers']} workers"
    title = f"{load}; {fleet} without engines. Times are those of a placement.\n"
    return "\n".join([title, _table([["what", "measured"], ["---", "---"], *rows])])


def _times(took: dict[str, float]) -> str:
    return ", ".join(f"{took[key]:.0f}" for key in ("p50_ms", "p99_ms", "max_ms"))


def _sum(plans: Sequence[dict[str, Any]], key: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for plan in plans:
        total.update(plan[key])
    return total


def _listed(title: str, counts: Counter[str]) -> str:
    text = f"{title}: {', '.join(f'{name} {count}' for name, count in sorted(counts.items()))}."
    return textwrap.fill(text, 110, break_on_hyphens=False) + "\n"


def _table(lines: Sequence[Sequence[Any]]) -> str:
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"
