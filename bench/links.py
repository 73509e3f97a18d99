"""Baton over wires that are not ideal, and while two of its hosts do not reach each other.

Two prefill and two decode workers, the scheduler and the router, each on a host of its own
(harness/links.py: network namespaces and a relay), with the shipped commands, mutual TLS and the model's own
drafts. Every prompt is handed over (`scheduler.idle_decode_tokens: 0`); all else is as by default. Clients
reach the router over an ideal network, and every answer is compared, token for token, with that of one vLLM.

`wires`: the same load over each kind of wire. `cuts`: an ideal wire, and for some seconds nothing passes
between the hosts of some pairs, which neither side is told.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from harness.chaos.answers import Questions, sample, take
from harness.chaos.load import Answer, Load, judge
from harness.chaos.site import Part
from harness.deployment import stock_vllm
from harness.links import Wire, why_not
from harness.stats import percentile, save
from harness.wired import Wired, wired

WIRES = {
    "ideal": Wire(),
    "10 ms": Wire(delay_ms=10),
    "50 ms": Wire(delay_ms=50),
    "1 % loss": Wire(loss=0.01),
    "100 Mbit/s": Wire(rate_mbit=100),
    "10 ms, 1 % loss, 100 Mbit/s": Wire(delay_ms=10, loss=0.01, rate_mbit=100),
}
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PREFILL, DECODE = WORKERS[:2], WORKERS[2:]
# By name: the pairs that are cut, and whether a path is left by which a request can be answered meanwhile.
CUTS: dict[str, tuple[Sequence[tuple[str, str]], bool]] = {
    "one prefill from one decode": ([("prefill-0", "decode-0")], True),
    "every prefill from every decode": (list(itertools.product(PREFILL, DECODE)), True),
    "one decode from the scheduler": ([("decode-0", "scheduler")], True),
    "every worker from the scheduler": ([(worker, "scheduler") for worker in WORKERS], True),
    "one prefill from the router": ([("prefill-0", "router")], True),
    "one decode from the router": ([("decode-0", "router")], True),
    "every worker from the router": ([(worker, "router") for worker in WORKERS], False),
}
CLIENTS = 6
EVERY = 3  # one in so many prompts is asked
STAGES = ("save", "wait", "move", "check", "load")
WARM_S = 4.0
Sums = dict[str, tuple[float, float]]  # by stage: seconds, handoffs


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
        prog="python -m bench links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--wire", choices=WIRES, action="append", help="one of them; all by default")
    parser.add_argument("--cut", choices=CUTS, action="append", help="one of them; all by default")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of each cut; the load over each wire takes three quarters of it",
    )
    parser.add_argument("--dry", action="store_true", help="save nothing")
    options = parser.parse_args(arguments)
    if why := why_not():
        raise SystemExit(f"no wires: {why}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = sample(EVERY)
        with stock_vllm(folder / "stock") as (url, _):
            answers = asyncio.run(take(url, prompts))
        asked = Questions(dict(zip(prompts, answers, strict=True)), cost=True)
        config = {"scheduler": {"idle_decode_tokens": 0}}
        with wired(folder, prefill=len(PREFILL), decode=len(DECODE), cold=True, config=config) as one:
            wires = {}
            _calm(one, asked, WARM_S)
            for wire in options.wire or WIRES:
                wires[wire] = over(one, asked, WIRES[wire], 0.75 * options.seconds)
                print(wire, wires[wire], flush=True)
            one.links.be(Wire())
            cuts = {}
            for cut in options.cut or CUTS:
                cuts[cut] = during(one, asked, *CUTS[cut], options.seconds)
                print(cut, cuts[cut], flush=True)
    if not options.dry:
        save("links", {"clients": CLIENTS, "seconds": options.seconds, "wires": wires, "cuts": cuts})
    bad = [name for name, one in wires.items() if one["failed"] or one["wrong"]]
    bad += [name for name, one in cuts.items() if one["wrong"] or (one["failed"] and one["path_left"])]
    if bad:
        raise SystemExit(f"requests failed or were wrong: {bad}")


def over(one: Wired, asked: Questions, wire: Wire, seconds: float) -> dict[str, Any]:
    """Measure a load over wires of one kind."""
    one.links.be(wire)

    async def run() -> tuple[Load, Sums, Sums]:
        async with Load(Served(one.url), asked, CLIENTS, "warm"):
            await asyncio.sleep(WARM_S)  # the connections know the wire
        before = await stages(one.url)
        async with Load(Served(one.url), asked, CLIENTS, "links") as load:
            await asyncio.sleep(seconds)
        return load, before, await stages(one.url)

    frames = one.links.counts()
    with one.network.inside():
        load, before, after = asyncio.run(run())
    means = {stage: _mean(before.get(stage, (0, 0)), after.get(stage, (0, 0))) for stage in STAGES}
    handoffs = [answer.cost["handoff_ms"] for answer in load.over if answer.cost.get("handoff_ms")]
    counts = one.links.counts()
    return {
        **asdict(wire),
        **fates(load),
        **latencies(load.over),
        "handoffs": len(handoffs),
        "handoff_p50_ms": round(percentile(handoffs, 0.5), 1),
        "handoff_p99_ms": round(percentile(handoffs, 0.99), 1),
        "stage_mean_ms": means,
        "attempts": sum(answer.cost.get("attempts", 0) for answer in load.over),
        "frames": {name: counts[name] - frames[name] for name in counts},
    }


def during(
    one: Wired, asked: Questions, pairs: Sequence[tuple[str, str]], path_left: bool, seconds: float
) -> dict[str, Any]:
    """Measure a load before, during and after a cut."""

    async def run() -> tuple[Load, float, float]:
        async with Load(Served(one.url), asked, CLIENTS, "links") as load:
            await asyncio.sleep(seconds / 4)
            began = time.monotonic()
            with one.links.cut(*pairs):
                await asyncio.sleep(seconds)
            healed = time.monotonic()
            await asyncio.sleep(0.4 * seconds)
        return load, began, healed

    before = one.links.counts()
    with one.network.inside():
        load, began, healed = asyncio.run(run())
    frames = one.links.counts()["cut"] - before["cut"]
    hit = [answer for answer in load.over if answer.ended > began and answer.sent < healed]
    pauses = [end - start for answer in hit for start, end in answer.pauses()]
    used = [answer.sent - healed for answer in load.over if answer.sent > healed and _crosses(answer, pairs)]
    inside = [answer for answer in load.over if began < answer.sent and answer.ended < healed]
    one.wait_ready()  # what a cut left behind must not count for the next one
    return {
        "pairs": len(pairs),
        "path_left": path_left,
        "frames": frames,  # that were sent and did not pass
        **fates(load),
        "while_cut": len(hit),
        "begun_and_ended_while_cut": len(inside),
        "longest_pause_s": round(max(pauses, default=0.0), 2),
        **latencies(inside),
        "attempts_more": sum(max(0, answer.cost.get("attempts", 1) - 1) for answer in load.over),
        # from the end of the cut until the first request was sent that used what was cut
        "used_again_s": round(min(used), 1) if used else None,
    }


def _calm(one: Wired, asked: Questions, seconds: float) -> None:
    async def run() -> None:
        async with Load(Served(one.url), asked, CLIENTS, "calm"):
            await asyncio.sleep(seconds)

    with one.network.inside():
        asyncio.run(run())


def _crosses(answer: Answer, pairs: Sequence[tuple[str, str]]) -> bool:
    """Tell whether a request used what lies between the hosts of a pair."""
    prefill, decode = (f"{answer.cost.get(f'{role}_worker')}" for role in ("prefill", "decode"))
    if any("decode" in pair[1] for pair in pairs):
        return (prefill, decode) in pairs
    return bool({pair[0] for pair in pairs} & {prefill, decode})


def fates(load: Load) -> dict[str, Any]:
    verdicts = [judge(answer, load.expected(answer)) for answer in load.over]
    counts = Counter(fate.value for fate, _ in verdicts)
    for _, why in verdicts:
        if why:
            print(why, flush=True)
    return {
        "requests": len(load.over),
        "tokens": load.tokens,
        "failed": len(load.over) - counts["right"] - counts["wrong"],
        "wrong": counts["wrong"],
        "refused": sum(len(answer.refused) for answer in load.over),
    }


def latencies(answers: Sequence[Answer]) -> dict[str, float]:
    """Return times to the first token and gaps between the pieces of streams, ms."""
    streams = [answer for answer in answers if answer.case.stream and answer.arrivals]
    ttft = [answer.arrivals[0] - answer.sent for answer in streams]
    gaps = [late - early for answer in streams for early, late in itertools.pairwise(answer.arrivals)]
    found: dict[str, float] = {}
    for name, values in (("ttft", ttft), ("itl", gaps)):
        for share, suffix in ((0.5, "p50"), (0.99, "p99")):
            found[f"{name}_{suffix}_ms"] = round(1e3 * percentile(values, share), 1) if values else 0.0
    return found


async def stages(url: str) -> Sums:
    """Return what the router has counted of each stage of the handoffs."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    sums: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name == "baton_router_handoff_stage_seconds":
            for one in family.samples:
                at = {"_sum": 0, "_count": 1}.get(one.name.removeprefix(family.name))
                if at is not None:
                    sums.setdefault(one.labels["stage"], [0.0, 0.0])[at] += one.value
    return {stage: (seconds, count) for stage, (seconds, count) in sums.items()}


def _mean(before: tuple[float, float], after: tuple[float, float]) -> float:
    count = after[1] - before[1]
    return round(1e3 * (after[0] - before[0]) / count, 2) if count else 0.0
