"""Placements of real schedulers: how many, how soon, and at what cost.

    python -m bench scheduler                               the arms of the page
    python -m bench scheduler --against FOLDER --rounds 3   beside another checkout, in turns
    python -m bench scheduler --stores memory --routers 1 --pairs 32 --schedulers 1

Schedulers, Redis, the routers' clients and fake workers with heartbeats are processes of their own
(bench/scheduler_site.py). Each arm differs in one thing from the first one: 20 routers and 32P32D with a
scheduler over Redis. First routers place at a rate, and each request lives for two seconds; then as fast as
they can. A placement includes the reports that its prompt was prefilled, and of its end.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from bench.options import options
from bench.scheduler_site import Arm, measure
from harness.stats import save
from harness.support import ROOT

BASE = Arm()


def main(arguments: list[str]) -> None:
    kinds = ["memory", "redis", "stopped"]
    given = options(
        __doc__,
        arguments,
        stores=(kinds, "stopped: a Redis that hangs midway", kinds),
        routers=[1, 2, 100],
        pairs=([500], "prefill and decode workers"),
        schedulers=[2],
        rate=(500.0, "placements a second, of all routers"),
        seconds=(8.0, "of each of the two parts"),
        rounds=(1, "the one with the shortest p50 counts: other work only makes them longer"),
        against=(Path, "another checkout, measured in turns"),
    )
    codes = {"here": ROOT} | ({"against": given.against.resolve()} if given.against else {})
    found: dict[str, dict[str, dict[str, float]]] = {code: {} for code in codes}
    for arm in arms(given):
        runs: dict[str, list[dict[str, float]]] = {code: [] for code in codes}
        for _ in range(given.rounds):
            for code, folder in codes.items():
                figures = measure(arm, folder, given.rate, given.seconds)
                shown = ", ".join(f"{key} {value:g}" for key, value in figures.items())
                print(f"{arm}, {code}: {shown}", flush=True)
                runs[code].append(figures)
        for code, several in runs.items():
            found[code][str(arm)] = min(several, key=lambda one: one["place_p50_ms"])
    load = {"rate": given.rate, "seconds": given.seconds, "rounds": given.rounds}
    save("scheduler", {**load, "arms": found})


def arms(given: argparse.Namespace) -> list[Arm]:
    """Return the arms to measure."""
    some = [replace(BASE, store=one) for one in given.stores]
    some += [replace(BASE, routers=one) for one in given.routers]
    some += [replace(BASE, pairs=one) for one in given.pairs]
    some += [replace(BASE, schedulers=one) for one in given.schedulers]
    return list(dict.fromkeys(some))
