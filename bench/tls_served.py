"""The cost of mutual TLS on what is served: 1P1D in plain text and with TLS, both over TCP, in turns.

Each turn is a deployment of its own: one that was started with luck, as to where its memory lies, is not
faster in every turn. Every prompt is handed over, and both get the same prompts in each round. Answers that
were requested one at a time are compared, token by token.
"""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.model import MODEL_NAME, engine_settings
from bench.traffic import Answer, stream
from harness.deployment import Deployment, deployment
from harness.stats import compared

ROUNDS = 5
STREAMS = {1: 6, 8: 24}  # streams: prompts of a turn
PROMPT_TOKENS, ANSWER_TOKENS = 300, 64
ARMS = ("plain", "tls")

Turn = dict[int, tuple[list[Answer], float]]  # by streams: the answers, and the seconds for all


def measure() -> dict[str, Any]:
    """Measure tokens/s of each turn, and each request's time to first token.

    Raises SystemExit where an answer differs.
    """
    draw = random.Random(1)
    turns: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
    order = list(ARMS)
    for _ in range(ROUNDS):
        asked = {streams: prompts(draw, count) for streams, count in STREAMS.items()}
        for arm in order:
            turns[arm].append(turn(arm, asked))
        alone = [[answer.token_ids for answer in turns[arm][-1][1][0]] for arm in ARMS]
        if alone[0] != alone[1]:
            raise SystemExit("an answer differs with TLS: the figures would mean nothing")
        order.reverse()
    return {
        "rounds": ROUNDS,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "streams": {
            str(streams): {
                "tokens_per_s": compared({arm: [_rate(one[streams]) for one in turns[arm]] for arm in ARMS}),
                "ttft_ms": compared(
                    {
                        arm: [1e3 * answer.ttft for one in turns[arm] for answer in one[streams][0]]
                        for arm in ARMS
                    }
                ),
            }
            for streams in STREAMS
        },
    }


def turn(arm: str, asked: dict[int, list[list[int]]]) -> Turn:
    """Start a deployment, warm it up, and ask everything."""
    with tempfile.TemporaryDirectory() as folder:
        tls = {"tls": True, "ca": str(Path(folder) / "ca")}
        with deployment(
            Path(folder) / arm,
            engine=engine_settings(),
            handoff={"transports": ["tcp"]},
            scheduler={"idle_decode_tokens": 0},
            security=tls if arm == "tls" else {},
        ) as one:
            one.up(1, 1)
            return asyncio.run(_ask_all(one, asked))


async def _ask_all(one: Deployment, asked: dict[int, list[list[int]]]) -> Turn:
    await ask(one, prompts(random.Random(2), 16), 8)  # warm up
    return {streams: await ask(one, some, streams) for streams, some in asked.items()}


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    """Draw prompts that no prefix cache has seen."""
    return [[draw.randrange(100, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def ask(one: Deployment, asked: list[list[int]], streams: int) -> tuple[list[Answer], float]:
    """Return the answers in the prompts' order, requested `streams` at a time, and the seconds for all."""
    gc.collect()
    room = asyncio.Semaphore(streams)

    async def answer(http: aiohttp.ClientSession, prompt: list[int]) -> Answer:
        async with room:
            return await stream(http, one.url, MODEL_NAME, prompt, ANSWER_TOKENS)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        began = time.perf_counter()
        found = await asyncio.gather(*(answer(http, prompt) for prompt in asked))
        return list(found), time.perf_counter() - began


def _rate(asked: tuple[list[Answer], float]) -> float:
    answers, took = asked
    return sum(answer.tokens for answer in answers) / took
