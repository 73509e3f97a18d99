"""Measure a profile for the simulator, with clients of a deployment that has one worker.

    decode      the gap between tokens, by the number of streams
    overhead    the time to first token of a prompt of one token, less one such gap for its step
    prefill     the time to first token of prompts of one step, less the overhead; a prompt of many steps
                gives the cost of the tokens before a chunk

Prompts are random, so none is cached. The lower quartile of several rounds is used, because other load on the
machine only makes times longer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise

import aiohttp

from baton.protos import scheduler_pb2 as pb
from baton.services.simulate.profile import Engine, Pace, Profile
from harness.deployment import Deployment
from harness.simulate.validate import Answer, Stream
from harness.stats import percentile

Send = Callable[[int, int], Awaitable[Answer]]  # called with tokens of prompt and output

ROUNDS = 9  # per size
QUARTILE = 0.25
TOKENS = 48  # per stream


@dataclass(frozen=True)
class Sizes:
    step: int  # tokens of a step
    long: int  # tokens of a prompt of many steps
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)


async def measure(one: Deployment, stream: Stream, sizes: Sizes, name: str) -> Profile:
    draw = random.Random(0)
    async with aiohttp.ClientSession() as http:

        async def ask(tokens: int, output: int) -> Answer:
            return await stream(http, [draw.randrange(100, 4_000) for _ in range(tokens)], output)

        await asyncio.gather(*(ask(sizes.step, 8) for _ in range(4)))  # warms up
        decode = [(batch, await _batch(ask, batch)) for batch in sizes.batches]
        overhead_s = max(0.0, await _first_s(ask, 1) - decode[0][1])
        pieces = [sizes.step // 8, sizes.step // 4, sizes.step // 2, sizes.step]
        points = [(tokens, await _first_s(ask, tokens) - overhead_s) for tokens in pieces]
        long_s = await _first_s(ask, sizes.long) - overhead_s
    base_s = max(0.0, points[0][1] - (points[1][1] - points[0][1]))
    return Profile(
        name=name,
        pace=Pace(
            prefill=[(0, base_s), *points],
            prefill_context_s=_context_s(points[-1][1], sizes, long_s),
            decode=[(0, min(base_s, decode[0][1])), *decode],
            overhead_s=overhead_s,
        ),
        engine=_engine(one.describe().workers[0]),
    )


async def _first_s(ask: Send, tokens: int) -> float:
    """Return the time to first token of a single prompt."""
    answers = [await ask(tokens, 1) for _ in range(ROUNDS)]
    return percentile([one.arrivals[0] - one.asked for one in answers], QUARTILE)


async def _batch(ask: Send, batch: int) -> float:
    """Return the gap between tokens of simultaneous streams."""
    gaps: list[float] = []
    for _ in range(3):
        streams = await asyncio.gather(*(ask(16, TOKENS) for _ in range(batch)))
        begin = max(one.arrivals[0] for one in streams)  # all of them decode from here to `end`
        end = min(one.arrivals[-1] for one in streams)
        for one in streams:
            inside = [at for at in one.arrivals if begin <= at <= end]
            gaps += [after - before for before, after in pairwise(inside)]
    return percentile(gaps, QUARTILE)


def _engine(worker: pb.WorkerStatus) -> Engine:
    capacity = worker.identity.capacity
    return Engine(
        step_tokens=capacity.max_num_batched_tokens,
        batch=capacity.max_num_seqs,
        kv_tokens=capacity.num_blocks * capacity.block_size,
        max_model_len=capacity.max_model_len,
    )


def _context_s(step_s: float, sizes: Sizes, long_s: float) -> float:
    """Return the cost, in seconds, of attending from one token to one token of an earlier step."""
    steps = sizes.long / sizes.step
    pairs = sizes.long**2 / 2 - steps * sizes.step**2 / 2  # step_s includes pairs within a step
    return max(0.0, (long_s - steps * step_s) / pairs)
