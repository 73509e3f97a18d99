"""Send requests over HTTP and record every token's arrival time."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.light import Timed, greedy
from bench.served import no_pauses
from harness.stats import median, percentile

Prompt = list[int] | list[dict[str, Any]] | str  # token ids, a chat, or text


@dataclass
class Answer(Timed):
    """A streamed answer."""

    token_ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


async def stream(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Prompt,
    max_tokens: int,
    *,
    into: Answer | None = None,
    **more: Any,
) -> Answer:
    """Stream a greedy answer of exactly `max_tokens`. Raises RuntimeError if it is not complete.

    into: an answer to fill, for a caller that watches; more: further fields of the request.
    """
    chat = bool(prompt) and isinstance(prompt[0], dict)
    body = greedy(model, max_tokens, **{"messages" if chat else "prompt": prompt, **more})
    answer = Answer(time.perf_counter()) if into is None else into
    path = "chat/completions" if chat else "completions"
    async with http.post(f"{url}/v1/{path}", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[6:])
            if "error" in data:
                raise RuntimeError(data["error"])
            ids = data["choices"][0].get("token_ids") or []
            if ids:
                answer.arrivals.append(time.perf_counter())
                answer.token_ids += ids
    if answer.tokens != max_tokens:
        raise RuntimeError(f"got {answer.tokens} tokens instead of {max_tokens}")
    return answer


@dataclass(frozen=True)
class Mix:
    """Closed-loop streams of short prompts while long prompts arrive at a steady rate."""

    streams: int = 4
    short_prompt: int = 32  # tokens
    short_answer: tuple[int, int] = (32, 64)
    long_prompt: int = 900
    long_answer: int = 16
    long_per_s: float = 0.8
    seconds: float = 30.0
    vocabulary: int = 4000

    @property
    def arrivals(self) -> int:
        """The number of long prompts."""
        return int(self.seconds * self.long_per_s)


async def run(
    mix: Mix, url: str, model: str, seed: int, instead: Iterator[Prompt] | None = None
) -> dict[str, float]:
    """Run the mix once against `url`. Return latencies in ms and tokens/s.

    instead: prompts that arrive instead of the long ones.
    """
    with no_pauses():
        return await _run(mix, url, model, seed, instead)


async def _run(
    mix: Mix, url: str, model: str, seed: int, instead: Iterator[Prompt] | None
) -> dict[str, float]:
    draw = random.Random(seed)
    short: list[Answer] = []
    long: list[Answer] = []
    began = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=mix.seconds + 60)
    async with aiohttp.ClientSession(timeout=timeout) as http:

        def prompt(length: int) -> list[int]:
            return [draw.randrange(100, mix.vocabulary) for _ in range(length)]

        async def loop() -> None:
            while time.perf_counter() - began < mix.seconds:
                length = draw.randint(*mix.short_answer)
                short.append(await stream(http, url, model, prompt(mix.short_prompt), length))

        async def arrive(at: float) -> None:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            asked = prompt(mix.long_prompt) if instead is None else next(instead)
            long.append(await stream(http, url, model, asked, mix.long_answer))

        await asyncio.gather(
            *(loop() for _ in range(mix.streams)),
            *(arrive((i + 0.5) / mix.long_per_s) for i in range(mix.arrivals)),
        )
    took = time.perf_counter() - began
    gaps = [1e3 * gap for answer in short for gap in answer.gaps]
    waits = {
        kind: [1e3 * answer.ttft for answer in some] for kind, some in (("short", short), ("long", long))
    }
    return {
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "itl_max_ms": max(gaps),
        **{f"ttft_{kind}_p50_ms": median(some) for kind, some in waits.items()},
        **{f"ttft_{kind}_p99_ms": percentile(some, 0.99) for kind, some in waits.items()},
        "tokens_per_s": sum(answer.tokens for answer in short + long) / took,
        "short_answers": float(len(short)),
        "long_answers": float(len(long)),
    }
