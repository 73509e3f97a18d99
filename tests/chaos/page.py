"""The figures of a run as a file, and as the tables of docs/reliability.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import stats
from tests.chaos.outcome import Outcome
from tests.support import ROOT

RESULTS = stats.RESULTS / "chaos.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def save(file: Path, outcomes: Sequence[Outcome]) -> None:
    """All plans of a run so far, and the machine."""
    stats.save(file.stem, {"plans": [one.as_json() for one in outcomes]}, file.parent)


def write(file: Path, page: Path = PAGE) -> Path:
    """Put the tables of a run between the marks of the page. Raises ValueError where there are none."""
    text = page.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no {BEGIN} ... {END}")
    page.write_text(f"{head}{BEGIN}\n{tables(json.loads(file.read_text()))}{END}{tail}")
    return page


def tables(result: dict[str, Any]) -> str:
    """Markdown: a table of the plans, and what was done and hit in all."""
    machine, plans = result["machine"], result["plans"]
    minutes = sum(one["seconds"] for one in plans) / 60
    faults, stages, retries = (_sum(plans, key) for key in ("faults", "stages", "retries"))
    return "\n".join(
        [
            f"\n{sum(faults.values())} faults in {minutes:.1f} minutes; {machine['cores']} cores "
            f"({machine['cpu']}), {machine['when']}.\n",
            _table([_HEAD, ["---"] * len(_HEAD), *map(_row, plans)]),
            _table([["fault", "times"], ["---", "---"], *sorted(faults.items())]),
            "Requests that a fault hit, by the role of its victim and where the request stood:\n",
            _table([["role, stage", "requests"], ["---", "---"], *sorted(stages.items())]),
            "Attempts at requests that came to nothing, as the routers counted them:\n",
            _table([["trouble", "attempts"], ["---", "---"], *sorted(retries.items())]),
        ]
    )


_HEAD = [
    *("plan", "fleet", "drafts", "store", "seed", "requests", "failed", "wrong tokens", "blocks left"),
    *("leases left", "longest pause, s", "with a worker left, s", "limit, s", "p99, s", "restarts"),
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
        f"{plan['pause_limit_s']:.1f}",
        f"{plan['p99_pause_s']:.2f}",
        plan["restarts"],
    ]


def _sum(plans: Sequence[dict[str, Any]], key: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for plan in plans:
        total.update(plan[key])
    return total


def _table(lines: Sequence[Sequence[Any]]) -> str:
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"
