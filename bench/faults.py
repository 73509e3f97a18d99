"""Each fault of the chaos harness against the alert that must name it, and no alert in healthy minutes.

    python -m bench faults                        all, after 30 healthy minutes: an hour and a half
    python -m bench faults --healthy 60 --only kill-decode --only kill-redis     the others keep their figures
    python -m bench faults --page                 docs/runbooks/README.md from the last figures

Needs Debian's prometheus and chromium. Writes bench/results/fault-catalogue.json, docs/runbooks/README.md,
and what the live page showed when each alert fired, docs/figures/faults/.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.boards.alerts import ALERTS, EVERY_S
from harness import stats
from harness.browser import browser_page
from harness.browser import why_not as no_browser
from harness.chaos.alerting import CALM_S, GOAL_S, NAMED, UNHEARD, Heard, Quiet, calm, hear, quiet
from harness.chaos.answers import questions
from harness.chaos.faults import FAULTS
from harness.chaos.load import Load
from harness.chaos.plans import MTP
from harness.chaos.site import Shape, Site
from harness.prometheus import prometheus, why_not
from harness.support import ROOT

RESULT = "fault-catalogue"
PAGE = ROOT / "docs" / "runbooks" / "README.md"
SHOTS = ROOT / "docs" / "figures" / "faults"
SHOT_MS = 10_000.0
CLIENTS = 6
HEALTHY_S = 1800.0
SETTLED_S = 20.0  # before the first fault: windows need a few scrapes
WHOLE_S = 120.0
EVERY = 4  # one in so many prompts


HEAD = """# Runbooks

Written by `python -m bench faults --page`. Each alert of `deploy/prometheus/rules.yaml` has a page.

"""
CATALOGUE = f"""
## Fault catalogue

The faults of the [chaos runs](../reliability.md) that an operator should hear of, each with the alert that
names it. It must fire within {GOAL_S:g} s of Prometheus noticing the fault, with a scrape every {EVERY_S} s.

"""
UNHEARD_HEAD = """
These faults raise no alert of their own:

"""


@dataclass(frozen=True)
class Group:
    """A deployment, and the faults that it is given one after the other."""

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


def main(arguments: Sequence[str]) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=list(NAMED), metavar="FAULT", help="default: all")
    parser.add_argument("--healthy", type=float, default=HEALTHY_S, help="seconds without a fault before")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args(arguments)
    if not options.page:
        if why := why_not() or no_browser():
            raise SystemExit(f"{why}: run deploy/setup/venv as root")
        SHOTS.mkdir(exist_ok=True)
        heard, calmly = asyncio.run(_run(options.only or list(NAMED), options.healthy, options.seed))
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    if not options.page and (calmly.alerts or not all(one.good for one in heard)):
        sys.exit(1)


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
                        shot = functools.partial(_shoot, site, name)
                        found = await hear(name, site, load, server, draw, shot)
                        heard.append(found)
                        _save(heard, total)
                        print(f"  {_said(found)}", flush=True)
                        await site.whole(WHOLE_S)
                        await calm(server, CALM_S)
    return heard, total


async def _shoot(site: Site, fault: str) -> None:
    """Keep what the live page shows."""
    async with browser_page(viewport={"width": 1000, "height": 620}) as (page, _):
        await page.goto(site.live_page)
        await page.wait_for_selector("[data-worker]", timeout=SHOT_MS)
        await page.screenshot(path=str(SHOTS / f"{fault}.jpg"), type="jpeg", quality=60)


def _save(heard: list[Heard], calmly: Quiet, folder: Path = stats.RESULTS) -> None:
    """Write what is known so far: a run is long. What was not measured this time keeps its figures."""
    before = folder / f"{RESULT}.json"
    kept: dict[str, Any] = json.loads(before.read_text()) if before.is_file() else {}
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


# -- the page


def page(result: Path = stats.RESULTS / f"{RESULT}.json") -> str:
    """Return docs/runbooks/README.md; with the catalogue's figures, if there are any."""
    measured: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {}
    alerts = [["alert", "severity", "fires after", "in short"], ["---"] * 4]
    alerts += [
        [f"[{one.name}]({one.name}.md)", one.severity, _waits(one.for_s), _plain(one.summary)]
        for one in ALERTS
    ]
    catalogue = "\n".join(_catalogue(measured))
    return f"{HEAD}{_table(alerts)}\n{CATALOGUE}{catalogue}\n{UNHEARD_HEAD}{_unheard()}\n"


def _unheard() -> str:
    by_reason: dict[str, list[str]] = {}
    for name, why in UNHEARD.items():
        by_reason.setdefault(why, []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)}: {why}" for why, names in by_reason.items())


def _catalogue(measured: dict[str, Any]) -> list[str]:
    found = {one["fault"]: one for one in measured.get("faults", [])}
    head = ["fault", "what happens", "alert"]
    if found:
        head += ["noticed, s", "fires, s", "alerts beside it"]
    rows = [head, ["---"] * len(head)]
    for name, alert in NAMED.items():
        row = [_pictured(name), FAULTS[name].about.rstrip("."), f"[{alert}]({alert}.md)"]
        if found:
            one = found.get(name, {})
            others = ", ".join(one.get("others", [])) or "-"
            row += [_seconds(one.get("noticed_s")), _seconds(one.get("fired_s")), others]
        rows.append(row)
    if not found:
        return [_table(rows), "", "`python -m bench faults` measures the seconds until each fires."]
    machine, healthy = measured["machine"], measured["healthy"]
    alerts = ", ".join(healthy["alerts"]) or "none"
    return [
        _table(rows),
        "",
        f"Seconds since the fault began, on {machine['cores']} cores ({machine['cpu']}), {machine['when']}, "
        "by `python -m bench faults`. A fault's link shows the live page when the alert fired.",
        f"Alerts in {healthy['seconds'] / 60:.0f} healthy minutes under load: {alerts}.",
    ]


def _pictured(fault: str) -> str:
    shot = SHOTS / f"{fault}.jpg"
    return f"[`{fault}`](../figures/faults/{shot.name})" if shot.is_file() else f"`{fault}`"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _waits(seconds: int) -> str:
    return f"{seconds} s" if seconds else "at once"


def _plain(summary: str) -> str:
    words = {
        "{{ $labels.role }}": "ROLE",
        "{{ $labels.instance }}": "INSTANCE",
        "{{ $labels.method }}": "METHOD",
    }
    for template, word in words.items():
        summary = summary.replace(template, word)
    return summary.replace("{{ $value | humanizeDuration }}", "N s").replace("{{ $value }}", "N")


def _table(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main(sys.argv[1:])
