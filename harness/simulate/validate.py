"""Compare the simulator with reality: the same conversations, simulated and sent to a deployment.

Equal block hashes become equal tokens, and an answer is part of the next turn, so caches hit in both.
The comparison covers times to first token, and the prompt tokens that all engines computed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import aiohttp

from baton.services.simulate.figures import Outcome, Run
from baton.services.simulate.traces import Ask, Kind, Trace
from harness.deployment import Deployment
from harness.stats import percentile

SETTLE_S = 2.5  # after this time, all heartbeats have arrived
# "chats", scaled to a model of 80 M parameters on one core.
CHATS = Kind("multi-turn chats with a few system prompts", 4, 512, 96, 96, 24, 6, 2.0)


class Answer(Protocol):
    """A streamed answer, with times of `time.perf_counter`."""

    asked: float
    arrivals: list[float]
    token_ids: list[int]


Stream = Callable[[aiohttp.ClientSession, list[int], int], Coroutine[Any, Any, Answer]]


async def drive(one: Deployment, trace: Trace, stream: Stream) -> dict[str, float]:
    before = await _computed(one)
    sent: list[Outcome] = []
    began = time.perf_counter()
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as conversations:
        for ask in trace.begin():
            await asyncio.sleep(began + ask.at - time.perf_counter())
            conversations.create_task(_converse(trace, ask, began, lambda *of: stream(http, *of), sent))
    computed = await _computed(one) - before
    return _figures([one.first_s for one in sent], computed, sum(one.prompt for one in sent))


def simulated(run: Run) -> dict[str, float]:
    """Return the figures of `drive` for a simulation, which must have no warm-up."""
    outcomes = run.outcomes
    computed, prompts = (sum(getattr(one, what) for one in outcomes) for what in ("computed", "prompt"))
    return _figures([one.first_s for one in outcomes], computed, prompts)


def errors(real: dict[str, float], predicted: dict[str, float]) -> dict[str, float]:
    return {key: round(100 * (predicted[key] / real[key] - 1), 1) for key in real}


def _figures(first_s: Sequence[float], computed: int, prompts: int) -> dict[str, float]:
    return {
        "ttft_mean_ms": round(1e3 * sum(first_s) / len(first_s), 1),
        "ttft_p50_ms": round(1e3 * percentile(first_s, 0.5), 1),
        "ttft_p90_ms": round(1e3 * percentile(first_s, 0.9), 1),
        "computed_tokens": computed,
        "computed_share": round(computed / prompts, 4),
        "requests": len(first_s),
    }


async def _converse(
    trace: Trace,
    first: Ask,
    began: float,
    stream: Callable[[list[int], int], Coroutine[Any, Any, Answer]],
    sent: list[Outcome],
) -> None:
    ask: Ask | None = first
    so_far: list[int] = []
    while ask is not None:
        await asyncio.sleep(began + ask.at - time.perf_counter())
        prompt = _prompt(ask, so_far, trace.block_tokens)
        answer = await stream(prompt, ask.output)
        sent.append(Outcome(answer.asked, ask.prompt, ask.output, answer.arrivals[0], answer.arrivals[-1]))
        so_far = prompt + answer.token_ids
        ask = trace.after(ask, time.perf_counter() - began)


def _prompt(ask: Ask, so_far: list[int], block_tokens: int) -> list[int]:
    """Return the tokens of a prompt that continues the conversation."""
    tokens = list(so_far)
    at = len(tokens)
    while len(tokens) < ask.prompt:
        block, inside = divmod(at, block_tokens)
        drawn = random.Random(ask.hashes[block] if block < len(ask.hashes) else f"{ask.conversation} {block}")
        tokens += [drawn.randrange(100, 4_000) for _ in range(block_tokens)][inside:]
        at = (block + 1) * block_tokens
    return tokens[: ask.prompt]


async def _computed(one: Deployment) -> int:
    await asyncio.sleep(SETTLE_S)
    description = await asyncio.to_thread(one.describe)
    return sum(worker.load.counts.computed_tokens for worker in description.workers)
