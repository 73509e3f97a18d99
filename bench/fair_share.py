"""Measure the time to first token of ten short prompts that arrive just after long ones at a prefill worker.

One engine runs on one core, stepped as the worker's thread steps it: prompts that arrive during a step are
added after it. Ways of queueing alternate between rounds in the same engine. Times are CPU times, so other
work on the machine does not count.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.services.prefill import fair_share
from bench.options import options
from bench.served import MODEL_NAME, engine_settings
from harness.stats import median, percentile, save

LONG = 900  # tokens
SHORTS = 10
VLLM_STEP = 2048  # tokens; vLLM's own default on a CPU
STAGGER_S = 0.001  # the time between two arrivals; the first step has begun with the first long prompt


@dataclass(frozen=True)
class Way:
    """A rule for queueing prompts. Sizes are in tokens; 0 means vLLM's default."""

    step: int = 0  # limit of a step
    cap: int = 0  # one prompt's share of a step with others, unless an equal share is larger
    priority: bool = False


WAYS = {
    "as vLLM does": Way(),
    "order": Way(priority=True),
    "shares": Way(step=256, cap=64),
    "shares, order": Way(step=256, cap=64, priority=True),
    "shares, order, 512": Way(step=512, cap=128, priority=True),
}


@dataclass
class Round:
    """Milliseconds from each arrival to its first token, and of the whole round."""

    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)
    all: float = 0.0


class PrefillEngine:
    """Prefills prompts and generates one token for each."""

    def __init__(self, settings: dict[str, Any], core: int) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from baton.services.config import Settings
        from baton.services.engine.build import EnginePlan, build_engine

        made = Settings(
            **{"engine": settings | {"max_num_batched_tokens": VLLM_STEP}, "worker": {"cpu": str(core)}}
        )
        plan = EnginePlan(made, "bench", "", needs_handoffs=False)
        self._engine = build_engine(plan, lambda: None)
        self._scheduler = self._engine.scheduler
        self._random = random.Random(0)
        self._count = 0

    def use(self, way: Way) -> None:
        """Apply a queueing rule. The engine must be idle: vLLM reads these settings in each step."""
        from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

        scheduler = self._scheduler
        step = way.step or VLLM_STEP
        scheduler.max_num_scheduled_tokens = scheduler.scheduler_config.max_num_batched_tokens = step
        scheduler.scheduler_config.long_prefill_token_threshold = way.cap
        scheduler.adaptive_long_prefill_threshold = True
        scheduler.policy = SchedulingPolicy.PRIORITY if way.priority else SchedulingPolicy.FCFS
        scheduler.waiting = create_request_queue(scheduler.policy)
        scheduler.kv_holding_waiting = create_request_queue(scheduler.policy)

    def round(self, longs: int, way: Way) -> Round:
        """Start the first long prompt; the other long ones and then ten short ones arrive during its step."""
        lengths = [LONG] * longs + [self._random.randrange(20, 61) for _ in range(SHORTS)]
        return self._run([(at * STAGGER_S, length) for at, length in enumerate(lengths)], way)

    def flood(self, way: Way, count: int = 40) -> float:
        """Return prefilled tokens/s when all prompts arrive at once, every eighth of them long."""
        lengths = [LONG if at % 8 == 0 else self._random.randrange(20, 61) for at in range(count)]
        return 1e3 * sum(lengths) / self._run([(0.0, length) for length in lengths], way).all

    def _run(self, arrivals: Sequence[tuple[float, int]], way: Way) -> Round:
        engine, waiting, found = self._engine, list(arrivals), Round()
        running: dict[str, tuple[float, int]] = {}
        began = time.thread_time()
        while waiting or running:
            now = time.thread_time() - began
            while waiting and (waiting[0][0] <= now or not running):
                at, length = waiting.pop(0)
                running[self._add(at, length, way)] = at, length
            outputs, executed = engine.step_fn()
            engine.post_step(executed)
            now = time.thread_time() - began
            for client in (outputs or {}).values():
                for output in client.outputs:
                    at, length = running.pop(output.request_id)
                    (found.long if length == LONG else found.short).append((now - at) * 1e3)
        found.all = (time.thread_time() - began) * 1e3
        return found

    def _add(self, at: float, length: int, way: Way) -> str:
        from vllm import SamplingParams

        from baton.services.engine import wire

        self._count += 1
        name = f"request {self._count}"
        prompt = [self._random.randrange(300, 1500) for _ in range(length)]
        priority = fair_share.priority(at, length) if way.priority else 0
        params = SamplingParams(temperature=0.0, max_tokens=1)
        core = wire.new_request(name, prompt, params, priority=priority)
        self._engine.add_request(*self._engine.preprocess_add_request(core))
        return name


def measure(engine: PrefillEngine, rounds: int, longs: int) -> dict[str, dict[str, float]]:
    found: dict[str, list[Round]] = {name: [] for name in WAYS}
    flood: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(-1, rounds):
        for name, way in WAYS.items():
            engine.use(way)
            one, tokens_per_s = engine.round(longs, way), engine.flood(way) if number % 4 == 0 else None
            if number >= 0:
                found[name].append(one)
                flood[name] += [tokens_per_s] if tokens_per_s else []
    return {name: _summary(found[name], flood[name]) for name in WAYS}


def _summary(rounds: Sequence[Round], flood: Sequence[float]) -> dict[str, float]:
    short = [value for one in rounds for value in one.short]
    figures = {
        "short_p50_ms": median(short),
        "short_p99_ms": percentile(short, 0.99),
        "long_p50_ms": median([value for one in rounds for value in one.long]),
        "long_last_ms": median([max(one.long) for one in rounds]),
        "all_ms": median([one.all for one in rounds]),
        "flood_tokens_per_s": median(flood),
    }
    return {name: round(value, 1) for name, value in figures.items()}


def run(rounds: int, core: int) -> dict[str, Any]:
    # The prefix cache would hold the prompts of earlier rounds.
    engine = PrefillEngine(engine_settings() | {"enable_prefix_caching": False}, core)
    found = {f"behind {longs}": measure(engine, rounds, longs) for longs in (1, 4)}
    for behind, ways in found.items():
        for way, figures in ways.items():
            print(f"{behind} {way:>20}", figures, flush=True)
    return found


def main(arguments: list[str]) -> None:
    given = options(__doc__, arguments, rounds=10, core=0)
    found = run(given.rounds, given.core)
    result = {"long": LONG, "shorts": SHORTS, "rounds": given.rounds}
    save("fair-share", {**result, "models": {MODEL_NAME: found}})
