"""Placements of real schedulers: how many, how soon, and what they cost.

    python -m bench scheduler                               the arms of the page
    python -m bench scheduler --against FOLDER --rounds 3   beside another checkout, in turns
    python -m bench scheduler --stores memory --routers 1 --pairs 32 --schedulers 1

Schedulers, Redis, the routers' clients and fake workers with heartbeats are processes of their own
(bench/scheduler_site.py). Each arm differs from the first one, 20 routers and 32P32D with a scheduler over
Redis, in one thing. First routers place at a rate, each request lives for two seconds; then as fast as they
can. With each placement goes what it brings: the reports that its prompt was read, and of its end.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from bench.scheduler_site import Arm, measure
from harness.stats import save
from harness.support import ROOT

BASE = Arm()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = ("memory", "redis", "stopped")
    parser.add_argument(
        "--stores", nargs="*", choices=kinds, default=kinds, help="stopped: a Redis that hangs midway"
    )
    parser.add_argument("--routers", type=int, nargs="*", default=[1, 2, 100])
    parser.add_argument("--pairs", type=int, nargs="*", default=[500], help="prefill and decode workers")
    parser.add_argument("--schedulers", type=int, nargs="*", default=[2])
    parser.add_argument("--rate", type=float, default=500.0, help="placements a second, of all routers")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each of the two parts")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="the one with the shortest p50 counts: other work only makes them longer",
    )
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    options = parser.parse_args(arguments)
    codes = {"here": ROOT} | ({"against": options.against.resolve()} if options.against else {})
    found: dict[str, dict[str, dict[str, float]]] = {code: {} for code in codes}
    for arm in arms(options):
        runs: dict[str, list[dict[str, float]]] = {code: [] for code in codes}
        for _ in range(options.rounds):
            for code, folder in codes.items():
                figures = measure(arm, folder, options.rate, options.seconds)
                shown = ", ".join(f"{key} {value:g}" for key, value in figures.items())
                print(f"{arm}, {code}: {shown}", flush=True)
                runs[code].append(figures)
        for code, several in runs.items():
            found[code][str(arm)] = min(several, key=lambda one: one["place_p50_ms"])
    load = {"rate": options.rate, "seconds": options.seconds, "rounds": options.rounds}
    save("scheduler", {**load, "arms": found})


def arms(options: argparse.Namespace) -> list[Arm]:
    """Return what is to be measured."""
    some = [replace(BASE, store=one) for one in options.stores]
    some += [replace(BASE, routers=one) for one in options.routers]
    some += [replace(BASE, pairs=one) for one in options.pairs]
    some += [replace(BASE, schedulers=one) for one in options.schedulers]
    return list(dict.fromkeys(some))
