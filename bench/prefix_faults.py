"""Faults of what placement knows of caches: what is lost by them, and for how long.

A real 2P2D, each of whose prompts one prefill worker has in its cache. They are asked for once more each, at
a steady rate: while nothing happens; after the scheduler was killed, and its index with it; and after a
prefill worker was killed, which comes back with an empty cache. `baton up` starts both again. A first token
is slow if it takes more than half as long as without a cache: its prompt was computed again, or waited for
what died. Each answer is compared with the first one to its prompt.

Messages about caches that are lost, doubled or late are counted in heartbeats, on a worker's log and the
scheduler's ledger: the number of those after which the scheduler did not know all that was in the message.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from baton.block_log import BlockLog, Change
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.prefixes.index import PrefixIndex
from baton.scheduler.prefixes.ledger import PrefixLedger
from bench.model import MODEL_NAME, engine_settings
from bench.traffic import Answer, stream
from harness.deployment import Deployment, deployment
from harness.stats import median, save
from harness.support import eventually

PROMPT, ANSWER = 640, 8  # tokens
FATES = "lost", "its reply lost", "doubled", "late"  # of a message
QUIET_S, BACK_S = 3.0, 60.0  # for the last heartbeats; until workers are back
ROLES = "prefill", "decode"
BEATS, BLOCKS = 40, 16  # heartbeats of a way that fails, and blocks that are stored before each


def main(arguments: list[str]) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench prefix-faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each fault, with new prompts")
    parser.add_argument("--prompts", type=int, default=32, help="of a round")
    parser.add_argument("--per-s", type=float, default=3.0, help="requests a second")
    options = parser.parse_args(arguments)
    # In bfloat16 a prompt that is cached rounds differently from one that is computed.
    engine = engine_settings() | {"dtype": "float32"}
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder) / "one", engine=engine) as one,
    ):
        one.up(2, 2)
        faults = {
            name: [round_of(one, fault, options, number) for number in range(options.rounds)]
            for name, fault in FAULTS.items()
        }
    found = {name: summary(rounds) for name, rounds in faults.items()}
    messages = {fate: behind(fate) for fate in FATES}
    for name, figures in (found | {"messages": messages}).items():
        print(name, figures, flush=True)
    load = {"prompts": options.prompts, "per_s": options.per_s, "rounds": options.rounds, "tokens": PROMPT}
    save("prefix-faults", {"load": load, "faults": found, "messages": messages})


def nothing(one: Deployment) -> None:
    """Let all live."""


def kill_scheduler(one: Deployment) -> None:
    """Kill the scheduler, with its index."""
    one.scheduler_process().kill()


def kill_prefill(one: Deployment) -> None:
    """Kill a prefill worker, with its cache."""
    one.worker_process(one.worker("prefill")["identity"]["worker_id"]).kill()


FAULTS: dict[str, Callable[[Deployment], None]] = {
    "nothing": nothing,
    "scheduler killed": kill_scheduler,
    "prefill worker killed": kill_prefill,
}


def round_of(
    one: Deployment, fault: Callable[[Deployment], None], options: argparse.Namespace, number: int
) -> dict[str, Any]:
    """Measure one round, and wait until all workers are back."""
    found = asyncio.run(measure(one, fault, options, number))
    eventually(lambda: all(len(one.workers(role)) == 2 for role in ROLES), BACK_S, "all workers are back")
    return found


async def measure(
    one: Deployment, fault: Callable[[Deployment], None], options: argparse.Namespace, number: int
) -> dict[str, Any]:
    """Return times to first token, and when those that were slow were asked: seconds after the fault."""
    draw = random.Random(f"{fault.__name__} {number}")
    prompts = [[draw.randrange(100, 4000) for _ in range(PROMPT)] for _ in range(options.prompts)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:

        def ask(prompt: list[int]) -> asyncio.Task[Answer]:
            return asyncio.create_task(stream(http, one.url, MODEL_NAME, prompt, ANSWER))

        first = [await ask(prompt) for prompt in prompts]
        await asyncio.sleep(QUIET_S)
        fault(one)
        began, asked, again = time.monotonic(), [], []
        for at, prompt in enumerate(prompts):
            await asyncio.sleep(max(0.0, began + at / options.per_s - time.monotonic()))
            asked.append(time.monotonic() - began)
            again.append(ask(prompt))
        answers = [await one for one in again]
    long_s = median([answer.ttft for answer in first]) / 2
    return {
        "slow": [at for at, answer in zip(asked, answers, strict=True) if answer.ttft > long_s],
        "ttft_ms": [1e3 * answer.ttft for answer in answers],
        "first_ms": [1e3 * answer.ttft for answer in first],
        "wrong": sum(a.token_ids != b.token_ids for a, b in zip(first, answers, strict=True)),
    }


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts by round, and medians over all rounds."""
    return {
        "slow": [len(one["slow"]) for one in rounds],
        "last_slow_after_s": [round(max(one["slow"], default=0.0), 1) for one in rounds],
        "ttft_p50_ms": round(median(list(itertools.chain(*(one["ttft_ms"] for one in rounds)))), 1),
        "ttft_without_cache_p50_ms": round(
            median(list(itertools.chain(*(one["first_ms"] for one in rounds)))), 1
        ),
        "wrong": sum(one["wrong"] for one in rounds),
    }


class Way:
    """A way on which one message fares badly; the others arrive, and so do their replies."""

    def __init__(self, fate: str) -> None:
        self._fate = fate
        self.ledger = PrefixLedger(PrefixIndex(1 << 20))
        numbers = itertools.count(1)
        self.log = BlockLog(lambda: next(numbers))
        self._late: list[pb.BlockOperations] = []

    def beat(self, *, bad: bool) -> None:
        """Send what the scheduler lacks."""
        message = pb.BlockOperations()
        message.CopyFrom(self.log.message())
        if bad and self._fate == "late":
            self._late.append(message)
        elif bad and self._fate == "its reply lost":
            self.ledger.hear("w", message)
        elif not bad or self._fate == "doubled":
            self.log.heard(self.ledger.hear("w", message))
            for late in [message] if bad else self._late:
                self.ledger.hear("w", late)
            self._late.clear()


def behind(fate: str) -> int:
    """Return after how many heartbeats the scheduler lacked something, where one message fares like that."""
    draw, way = random.Random(fate), Way(fate)
    cache: list[int] = []
    lacking = 0
    for beat in range(BEATS):
        stored = [draw.getrandbits(60) for _ in range(BLOCKS)]
        cache += stored
        way.log.take(Change(stored=stored))
        way.beat(bad=beat == BEATS // 2)
        slot = way.ledger.slot("w")
        lacking += slot is None or not all(way.ledger.index.holders(key) >> slot & 1 for key in cache)
    return lacking
