"""Check that each fault of the chaos harness raises its alert, and that healthy minutes raise none.

    python -m bench faults                        all faults, after 30 healthy minutes: 1.5 hours
    python -m bench faults --healthy 60 --only kill-decode --only kill-redis   other faults keep their figures
    python -m bench faults --page                 write docs/runbooks/README.md from the last figures

Needs Debian's prometheus. Writes bench/results/fault-catalogue.json and docs/runbooks/README.md.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.options import options
from bench.report import markdown
from deploy.boards.alerts import ALERTS, EVERY_S
from harness import stats
from harness.chaos.alerting import CALM_S, GOAL_S, NAMED, UNHEARD, Heard, Quiet, calm, hear, quiet
from harness.chaos.load import Load
from harness.chaos.plans import MTP
from harness.chaos.questions import questions
from harness.chaos.site import Site
from harness.chaos.victims import Shape
from harness.prometheus import prometheus, why_not
from harness.support import ROOT

RESULT = "fault-catalogue"
PAGE = ROOT / "docs" / "runbooks" / "README.md"
CLIENTS = 6
SETTLED_S = 20.0  # the first fault waits for this long: rates need a few scrapes
WHOLE_S = 120.0
EVERY = 4  # use every fourth prompt


HEAD = """# Runbooks

Written by `python -m bench faults --page`. Each alert of `deploy/prometheus/rules.yaml` has a page:

"""
CATALOGUE = f"""
## Fault catalogue

An operator should hear of these faults of the [chaos runs](../reliability.md#break-it-yourself), which
`make chaos ARGS=--list` explains. The alert that names a fault must fire within {GOAL_S:g} s of Prometheus
noticing it.

"""
UNHEARD_HEAD = """
These faults raise no alert of their own:

"""


@dataclass(frozen=True)
class Group:
    """A deployment and its faults, in order."""

    name: str
    shape: Shape
    faults: tuple[str, ...]


GROUPS = (
    Group(
        "1P1D, a scheduler over Redis",
        Shape(1, 1, redis=True, speculation=MTP),
        (
            *("kill-prefill", "hang-prefill", "kill-decode", "hang-decode", "kill-pair", "corrupt-handoffs"),
            *("kill-scheduler", "lose-scheduler", "hang-scheduler", "lose-schedulers"),
            *("kill-scheduler-and-decode", "kill-redis", "empty-redis", "hang-redis", "fill-redis"),
            *("change-password", "kill-redis-and-scheduler", "start-scheduler-without-redis"),
        ),
    ),
    Group("1P1D, two routers", Shape(1, 1, routers=2, speculation=MTP), ("kill-router", "hang-router")),
    Group("1P1D behind proxies", Shape(1, 1, proxied=True, speculation=MTP), ("drop-network",)),
)


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        only=([str], "default: all", list(NAMED)),
        healthy=(1800.0, "seconds without a fault before"),
        seed=1,
        page=(False, "only write the page"),
    )
    if not given.page:
        if why := why_not():
            raise SystemExit(f"{why}: run deploy/setup/venv as root")
        heard, calmly = asyncio.run(_run(given.only or list(NAMED), given.healthy, given.seed))
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    if not given.page and (calmly.alerts or not all(one.good for one in heard)):
        raise SystemExit(1)


async def _run(names: list[str], healthy_s: float, seed: int) -> tuple[list[Heard], Quiet]:
    heard: list[Heard] = []
    total = Quiet()
    for number, group in enumerate(GROUPS):
        mine = [name for name in group.faults if name in names]
        if not mine:
            continue
        folder = Path(tempfile.mkdtemp(prefix="baton-faults-"))
        print(f"{group.name}: {', '.join(mine)}; logs in {folder}", flush=True)
        async with Site(group.shape, folder) as site:
            known = await questions(site.url(site.routers[0]), EVERY)
            with prometheus(folder, site.target_urls) as server:
                async with Load(site, known, CLIENTS, f"{seed} {group.name}") as load:
                    await asyncio.sleep(SETTLED_S)
                    one = await quiet(server, healthy_s if not heard else SETTLED_S)
                    total.seconds += one.seconds
                    total.alerts = {**total.alerts, **one.alerts}
                    print(f"  {one.seconds:.0f} healthy seconds: {one.alerts or 'no alert'}", flush=True)
                    for name in mine:
                        draw = random.Random(f"{seed} {name} {number}")
                        found = await hear(name, site, load, server, draw)
                        heard.append(found)
                        _save(heard, total)
                        print(f"  {_said(found)}", flush=True)
                        await site.whole(WHOLE_S)
                        await calm(server, CALM_S)
    return heard, total


def _save(heard: list[Heard], calmly: Quiet, folder: Path = stats.RESULTS) -> None:
    """Write the figures so far. Faults that were not measured this time keep theirs."""
    kept = stats.saved(RESULT, folder)
    found = {one["fault"]: one for one in kept.get("faults", [])}
    found |= {one.fault: dataclasses.asdict(one) | {"good": one.good} for one in heard}
    healthy = dataclasses.asdict(calmly)
    if (longer := kept.get("healthy", healthy))["seconds"] > calmly.seconds:
        healthy = {"seconds": longer["seconds"], "alerts": {**longer["alerts"], **calmly.alerts}}
    faults = [found[name] for name in NAMED if name in found]
    stats.save(RESULT, {"scrape_s": EVERY_S, "healthy": healthy, "faults": faults}, folder)


def _said(one: Heard) -> str:
    fired = "NOT IN TIME" if one.fired_s is None else f"after {one.fired_s:.1f} s"
    return f"{one.fault:30} {one.alert:22} {fired}; also: {', '.join(one.others) or '-'}"


def page(result: Path = stats.RESULTS / f"{RESULT}.json") -> str:
    """Return the text of docs/runbooks/README.md."""
    measured: dict[str, Any] = json.loads(result.read_text())
    alerts = "".join(
        f"- [{one.name}]({one.name}.md), {one.severity}{f', after {one.for_s} s' if one.for_s else ''}: "
        f"{_plain(one.summary)}\n"
        for one in ALERTS
    )
    unheard = [
        [", ".join(f"`{name}`" for name, given in UNHEARD.items() if given == why), why]
        for why in dict.fromkeys(UNHEARD.values())
    ]
    unheard_table = markdown([["faults", "why"], *unheard])
    return f"{HEAD}{alerts}{CATALOGUE}{_catalogue(measured)}\n{UNHEARD_HEAD}{unheard_table}\n"


def _catalogue(measured: dict[str, Any]) -> str:
    fired_s = {one["fault"]: one["fired_s"] for one in measured["faults"]}

    def said(fault: str) -> str:
        return f"{fault} {f'{value:.1f}' if (value := fired_s.get(fault)) else '-'}"

    rows = [
        [alert, ", ".join(said(fault) for fault, named in NAMED.items() if named == alert)]
        for alert in dict.fromkeys(NAMED.values())
    ]
    machine, healthy = measured["machine"], measured["healthy"]
    fired = ", ".join(healthy["alerts"]) or "none"
    return (
        f"{markdown([['alert', 'faults'], *rows])}\n\n"
        f"The number after a fault is the time from its beginning to the alert in seconds, with a scrape\n"
        f"every {EVERY_S} s; {machine['cores']} cores ({machine['cpu']}), {machine['when']}, by "
        "`python -m bench faults`.\n"
        f"Alerts in {healthy['seconds'] / 60:.0f} healthy minutes under load: {fired}."
    )


def _plain(summary: str) -> str:
    for label in ("role", "instance", "method"):
        summary = summary.replace(f"{{{{ $labels.{label} }}}}", label.upper())
    return summary.replace("{{ $value | humanizeDuration }}", "N s").replace("{{ $value }}", "N")
