"""Chats whose next turn needs a prefill worker: the KV of earlier turns pulled from where it lies, or not.

Two deployments of each fleet are up at once, one that pulls (`scheduler.prefix_pull_s`) and one that
does not, and have the same chats in turns. All chats of a round take a turn at a time; before the next one
the scheduler has heard what the workers hold, as it has where a person reads and types. What was computed is
told by the engines' own counts; `fetch` is the part of the time to first token in which a source was asked.
The model is in float32: both arms' answers are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from baton.protos import scheduler_pb2 as pb
from bench.model import MODEL_NAME, engine_settings
from bench.traffic import stream
from harness.deployment import Deployment, deployment
from harness.stats import median, save
from harness.support import eventually

HEARTBEAT_S = 0.2
HEARD_S = 10.0
# Fleet -> pairs, chats at a time.
FLEETS = {"1P1D": (1, 1), "2P2D": (2, 3)}
SIDES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


@dataclass(frozen=True)
class Shape:
    """Sizes of chats, in tokens."""

    turns: int
    message: int
    answer: int

    @property
    def longest(self) -> int:
        """Tokens of a chat, with its last answer."""
        return self.turns * (self.message + self.answer)


@dataclass
class Arm:
    """One deployment, and what its chats took: a list for each turn."""

    served: Deployment
    ttft_ms: list[list[float]] = field(default_factory=list)
    fetch_ms: list[list[float]] = field(default_factory=list)
    computed: dict[str, list[list[float]]] = field(default_factory=dict)  # tokens a chat, by side
    answers: list[list[int]] = field(default_factory=list)


def main(arguments: list[str]) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench chats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="of chats in each arm, after one that warms up")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--message", type=int, default=320, help="tokens of a user's message")
    parser.add_argument("--answer", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--pull-s", type=float, default=0.02, help="scheduler.prefix_pull_s")
    parser.add_argument("--fleet", choices=FLEETS, action="append", help="one of them; all by default")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    options = parser.parse_args(arguments)
    shape = Shape(options.turns, options.message, options.answer)
    found = {
        name: run(*FLEETS[name], shape, options.rounds, options.pull_s) for name in options.fleet or FLEETS
    }
    if not options.dry:
        sizes = {"turns": shape.turns, "message": shape.message, "answer": shape.answer}
        save("chats", {**sizes, "pull_s": options.pull_s, "rounds": options.rounds, "fleets": found})


def run(pairs: int, at_a_time: int, shape: Shape, rounds: int, pull_s: float) -> dict[str, Any]:
    """Measure one fleet in both arms; return figures by arm."""
    engine = engine_settings() | {"dtype": "float32", "max_model_len": shape.longest + 64}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms = {}
        for name, pays_s in (("off", 0.0), ("on", pull_s)):
            scheduler = {"prefix_pull_s": pays_s, "heartbeat_s": HEARTBEAT_S, "idle_decode_tokens": 0}
            one = deployment(folder / name, engine=engine, scheduler=scheduler, handoff={"staging_mib": 256})
            arms[name] = Arm(stack.enter_context(one).up(pairs, pairs))
        for number in range(rounds + 1):
            for name in ("off", "on") if number % 2 else ("on", "off"):
                asyncio.run(round_of(arms[name], at_a_time, shape, number))
    for name, arm in arms.items():
        print(f"{pairs}P{pairs}D {name}", figures(arm), flush=True)
    equal = sum(one == other for one, other in zip(arms["off"].answers, arms["on"].answers, strict=True))
    print(f"{equal} of {len(arms['on'].answers)} answers equal", flush=True)
    return {
        "chats_at_a_time": at_a_time,
        "answers": len(arms["on"].answers),
        "equal": equal,
        "arms": {name: figures(arm) for name, arm in arms.items()},
    }


async def round_of(arm: Arm, at_a_time: int, shape: Shape, number: int) -> None:
    """Have so many chats, turn by turn. Nothing is kept of the first round, which warms up."""
    draw = random.Random(number)

    def message() -> list[int]:
        return [draw.randrange(100, 4000) for _ in range(shape.message)]

    chats: list[list[int]] = [[] for _ in range(at_a_time)]
    answers: list[list[int]] = [[] for _ in range(at_a_time)]
    ttft, fetch, computed = [], [], {side: [] for side in SIDES}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        for _ in range(shape.turns):
            before, fetched = counts(arm.served), await fetched_s(http, arm.served.url)
            for chat in chats:
                chat.extend(message())
            got = await asyncio.gather(
                *(stream(http, arm.served.url, MODEL_NAME, chat, shape.answer) for chat in chats)
            )
            for chat, answer, one in zip(chats, answers, got, strict=True):
                chat.extend(one.token_ids)
                answer.extend(one.token_ids)
            after = await asyncio.to_thread(heard, arm.served, before, at_a_time * shape.answer)
            ttft.append(1e3 * median([one.ttft for one in got]))
            fetch.append(1e3 * (await fetched_s(http, arm.served.url) - fetched) / at_a_time)
            for side in SIDES:
                spent = after[side].computed_tokens - before[side].computed_tokens
                computed[side].append(spent / at_a_time)
    if number:
        arm.ttft_ms.append(ttft)
        arm.fetch_ms.append(fetch)
        arm.answers += answers
        for side, values in computed.items():
            arm.computed.setdefault(side, []).append(values)


async def fetched_s(http: aiohttp.ClientSession, url: str) -> float:
    """Return the seconds in which sources were asked so far, summed over all requests."""
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "baton_router_ttft_stage_seconds_sum" and sample.labels["stage"] == "fetch"
    ]
    return sum(found)


def counts(one: Deployment) -> dict[str, pb.EngineCounts]:
    """Return what the engines of each side have counted, by their last heartbeats."""
    found = {side: pb.EngineCounts() for side in SIDES}
    for worker in one.describe().workers:
        for side, role in SIDES.items():
            if worker.identity.role == role:
                found[side].computed_tokens += worker.load.counts.computed_tokens
                found[side].output_tokens += worker.load.counts.output_tokens
    return found


def heard(one: Deployment, before: dict[str, pb.EngineCounts], tokens: int) -> dict[str, pb.EngineCounts]:
    """Wait until the heartbeats have told of so many tokens; return all counts."""
    written = sum(each.output_tokens for each in before.values()) + tokens

    def told() -> list[dict[str, pb.EngineCounts]]:
        now = counts(one)
        return [now] if sum(each.output_tokens for each in now.values()) >= written else []

    return eventually(told, HEARD_S, "the scheduler has heard of the turn")[0]


def figures(arm: Arm) -> dict[str, Any]:
    """Return an arm's medians, by turn, and the last turn's time to first token against the first one's."""
    ttft = _by_turn(arm.ttft_ms)
    ratios = [turns[-1] / turns[0] for turns in arm.ttft_ms]
    return {
        "ttft_ms": ttft,
        "fetch_ms": _by_turn(arm.fetch_ms),
        "last_to_first": round(median(ratios), 2),
        **{f"{side}_computed": _by_turn(values) for side, values in arm.computed.items()},
    }


def _by_turn(rounds: list[list[float]]) -> list[float]:
    return [round(median(values), 1) for values in zip(*rounds, strict=True)]
