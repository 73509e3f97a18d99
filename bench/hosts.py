"""A host of a Ray cluster dies under load, with all its processes at once, and Ray brings its worker back.

Two hosts, prefill on one and decode on the other, with the model's own drafts; then the second is killed. In
`spare` a third host with room is there when it dies, in `joins` it joins once Ray has found the second dead.
`quick` has shorter health checks of Ray's (harness/ray_hosts.py).
Clients keep asking throughout: every token is compared with the answers of an undisturbed deployment. Times
are read from the progress of `baton ray up`, which are those of the moments when it printed them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.checked import Served, outcome
from harness.chaos.answers import questions
from harness.chaos.load import Load
from harness.netns import why_not
from harness.ray_hosts import QUICK, RayHosts, ray_hosts
from harness.stats import save
from harness.support import eventually

# By name: whether the third host is there before, and Ray's settings.
ARMS: dict[str, tuple[bool, Mapping[str, str]]] = {
    "spare": (True, {}),
    "joins": (False, {}),
    "spare, quick": (True, QUICK),
    "joins, quick": (False, QUICK),
}
CLIENTS = 8
EVERY = 3  # one in so many prompts is asked
CALM_S = 10.0  # of load before the host dies, and after its worker is back
LIMIT_S = 120.0  # for each step of what follows
LOOK_S = 0.05


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arm", choices=ARMS, action="append", help="one of them; all by default")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    options = parser.parse_args(arguments)
    if why := why_not():
        raise SystemExit(f"no hosts: {why}")
    arms = {arm: run(arm) for arm in options.arm or ARMS}
    for arm, figures in arms.items():
        print(arm, figures, flush=True)
    if not options.dry:
        save("ray-hosts", {"clients": CLIENTS, "arms": arms})
    if bad := [arm for arm, figures in arms.items() if figures["failed"] or figures["wrong"]]:
        raise SystemExit(f"requests failed or were wrong: {bad}")


def run(arm: str) -> dict[str, Any]:
    """Start the hosts, and measure one arm."""
    spare, ray = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder, ray_hosts(Path(folder), ray) as hosts:
        if spare:
            hosts.join("third")
            eventually(lambda: len(hosts.status()["nodes"]) == 3, 60, "the third host has joined", 1.0)
        with hosts.forwarded() as url:
            return asyncio.run(_under_load(hosts, url, spare))


async def _under_load(hosts: RayHosts, url: str, spare: bool) -> dict[str, Any]:
    asked = await questions(url, EVERY)
    times: dict[str, float] = {}
    async with Load(Served(url), asked, CLIENTS, "hosts") as load:
        await asyncio.sleep(CALM_S)
        hit = sum(bool(answer.tokens) for answer in load.running.values())
        await asyncio.to_thread(hosts.second.kill)
        began = time.monotonic()
        dead = "second       this node is dead"  # with quick health checks it comes first
        times["noticed_s"] = await _said(hosts, began, "second       does not answer", dead)
        times["dead_s"] = await _said(hosts, began, dead)
        if not spare:
            await asyncio.to_thread(hosts.join, "third")
            times["joined_s"] = time.monotonic() - began
        times["room_s"] = await _said(hosts, began, "has room on third")
        times["back_s"] = await _said(hosts, began, "; back on third")
        await asyncio.sleep(CALM_S)
    whole = time.monotonic() - began + CALM_S
    during = [
        answer for answer in load.over if answer.ended > began and answer.sent < began + times["back_s"]
    ]
    return {
        **{name: round(value, 1) for name, value in times.items()},
        "seconds": round(whole),
        "while_away": len(during),
        "streaming_when_it_died": hit,
        **outcome(load),
    }


async def _said(hosts: RayHosts, began: float, *texts: str) -> float:
    """Return the seconds from `began` until `baton ray up` printed one of the texts. Raises RuntimeError."""
    until = time.monotonic() + LIMIT_S
    while not any(text in hosts.text for text in texts):
        if hosts.up.poll() is not None:
            raise RuntimeError(f"baton ray up ended: {hosts.text}")
        if time.monotonic() > until:
            raise RuntimeError(f"baton ray up said none of {texts} within {LIMIT_S:g} s: {hosts.text}")
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - began
