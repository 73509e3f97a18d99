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
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from harness.chaos.answers import questions
from harness.chaos.load import Load, judge
from harness.chaos.site import Part
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


class Served:
    """The deployment as the load sees it: one router."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.routers: Sequence[Part] = [Part("router-0", "router", {}, cast(Any, self))]

    def url(self, router: Part) -> str:
        del router
        return self._url


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
        times["silent_s"] = await _said(hosts, "second       does not answer", began)
        times["dead_s"] = await _said(hosts, "second       this node is dead", began)
        if not spare:
            await asyncio.to_thread(hosts.join, "third")
            times["joined_s"] = time.monotonic() - began
        times["room_s"] = await _said(hosts, "has room on third", began)
        times["back_s"] = await _said(hosts, "; back on third", began)
        await asyncio.sleep(CALM_S)
    whole = time.monotonic() - began + CALM_S
    verdicts = [judge(answer, load.expected(answer)) for answer in load.over]
    fates = Counter(fate.value for fate, _ in verdicts)
    for _, why in verdicts:
        if why:
            print(why, flush=True)
    pauses = [end - start for answer in load.over for start, end in answer.pauses()]
    during = [
        answer for answer in load.over if answer.ended > began and answer.sent < began + times["back_s"]
    ]
    return {
        **{name: round(value, 1) for name, value in times.items()},
        "seconds": round(whole),
        "requests": len(load.over),
        "while_away": len(during),
        "streaming_when_it_died": hit,
        "tokens": load.tokens,
        "failed": len(load.over) - fates["right"] - fates["wrong"],
        "wrong": fates["wrong"],
        "refused": sum(len(answer.refused) for answer in load.over),
        "longest_pause_s": round(max(pauses), 2),
    }


async def _said(hosts: RayHosts, text: str, began: float) -> float:
    """Return the seconds from `began` until `baton ray up` printed a text."""
    async with asyncio.timeout(LIMIT_S):
        while text not in hosts.text:
            if hosts.up.poll() is not None:
                raise RuntimeError(f"baton ray up ended: {hosts.text}")
            await asyncio.sleep(LOOK_S)
    return time.monotonic() - began
