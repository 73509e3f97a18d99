"""`python -m bench gangs [--rounds 15] [--wakes 200]`: what lock-step costs an engine.

Engines of a tiny GLM-4-MoE run on a core each, without a scheduler or a router. Arms alternate in either
order, and ratios are taken pair by pair. Gangs of one differ least, so they have four times as many rounds.

    control two plain engines, one of which stands in for the gang: how far equal engines differ
    one     an engine without lock-step, and the same engine as a gang of one, which only this bench has
    two     two plain engines, and a gang of two, all with the same requests
    idle    a plain engine, and a gang of two in which only one engine has requests

A wake-up is the time from an engine's ring, because it has work, until the other engine begins its first
forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench.options import options
from harness.architectures.registry import ARCHITECTURES
from harness.gangs import Gang, Options, Times
from harness.stats import compared, median, percentile, save

MODEL = ARCHITECTURES["mtp-glm4-moe"]
STREAMS, WRITTEN = 4, 64  # requests of an engine at once; tokens of an answer
_names = itertools.count()


@dataclass(frozen=True)
class Arm:
    """Gangs that are measured together. A gang of one engine is a plain engine unless it is `alone`."""

    gangs: Sequence[Gang]
    busy: Sequence[Sequence[bool]] = ((True,),)  # the engines with requests
    alone: bool | None = None  # whether the only engine keeps step, as a gang of one


Requests = dict[str, tuple[list[int], int]]


def requests(prompts: Sequence[list[int]], written: int) -> Requests:
    return {f"r{next(_names)}": (prompt, written) for prompt in prompts}


def measured(gangs: Sequence[Gang], busy: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Let the busy engines of some gangs answer the same prompts at the same time."""
    prompts = MODEL.prompts(STREAMS)
    asked = [[requests(prompts, WRITTEN) if one else {} for one in each] for each in busy]
    for gang, own in zip(gangs, asked, strict=True):
        gang.begin(own)
    times: list[Times] = [time for gang in gangs for own in gang.end() for time in own]
    took = max(time.ended for time in times) - min(time.added for time in times)
    return {
        "tokens_per_s": len(times) * WRITTEN / took,
        "ttft_ms": median([(time.first - time.added) * 1e3 for time in times]),
    }


def alternated(rounds: int, arms: dict[str, Arm]) -> Any:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for number in range(rounds + 1):  # the first one warms up
        for name, arm in list(arms.items())[:: -1 if number % 2 else 1]:
            if arm.alone is not None:
                arm.gangs[0].call(0, "keep_step", arm.alone)
            runs[name].append(measured(arm.gangs, arm.busy))
            for gang in arm.gangs:
                gang.still()
    return {
        key: compared({name: [one[key] for one in own[1:]] for name, own in runs.items()})
        for key in ("tokens_per_s", "ttft_ms")
    }


def woken(gang: Gang, wakes: int) -> dict[str, float]:
    """Wake an idle gang `wakes` times. Return percentiles of the wake-up times, in milliseconds."""
    for rank in gang.heads:
        gang.call(rank, "watch")
    prompt = MODEL.prompts(1)
    for _ in range(wakes):
        gang.begin([requests(prompt, 1), {}])
        gang.end()
        gang.still()
    rang, began = (gang.call(rank, "woken") for rank in gang.heads)
    took = [(began[wave] - at) * 1e3 for wave, at in rang.items() if wave in began]
    return {"wakes": len(took), "p50_ms": percentile(took, 0.5), "p99_ms": percentile(took, 0.99)}


def dummies(gang: Gang) -> dict[str, int]:
    """Let one engine of two answer. Return the numbers of forward passes of both."""
    before = gang.still()
    measured([gang], [[True, False]])
    after = gang.still()
    return {
        "steps": after[0].steps - before[0].steps,
        "dummies": after[0].dummies - before[0].dummies,
        "others_dummies": after[1].dummies - before[1].dummies,
    }


def main(arguments: list[str]) -> None:
    given = options(__doc__, arguments, rounds=15, wakes=200)
    model = MODEL.target(MODEL.checkpoint())
    with ExitStack() as stack:

        def started(size: int = 1, core: int = 0) -> Gang:
            return stack.enter_context(Gang(Options(model, size, core=core)))

        engine, twin, other, two = started(), started(), started(core=1), started(2)
        plain = Arm([engine], alone=False)
        pairs = {
            "control": (plain, Arm([twin])),
            "one": (plain, Arm([engine], alone=True)),
            "two": (Arm([engine, other], [[True], [True]], alone=False), Arm([two], [[True, True]])),
            "idle": (plain, Arm([two], [[True, False]])),
        }
        costs = {
            name: alternated(
                given.rounds * (1 if two in second.gangs else 4), {"plain": first, "gang": second}
            )
            for name, (first, second) in pairs.items()
        }
        print(costs, flush=True)
        counted = dummies(two)
        wakes = woken(two, given.wakes)
        print(counted, wakes, flush=True)
    save(
        "gangs",
        {"streams": STREAMS, "written": WRITTEN, "rounds": given.rounds, "costs": costs}
        | {"forwards": counted, "wakes": wakes},
    )
