"""Greedy completions of the demo model as token ids: one, or a steady load of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai

from harness.deployment import MODEL_NAME
from harness.prompts import prompts

GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
WITHIN_S = 60.0
PAUSE_S = 0.1  # between a client's requests; without pauses, a client keeps an engine busy


def token_ids(done: Any) -> list[int]:
    """Return the token ids of a completion's only choice."""
    ids: list[int] = (done.choices[0].model_extra or {})["token_ids"]
    return ids


async def ask(client: openai.AsyncOpenAI, prompt: list[int], max_tokens: int) -> list[int]:
    return token_ids(
        await client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=max_tokens, **GREEDY)
    )


class Load:
    """Clients that keep sending the first prompts and checking the answers until `end`."""

    def __init__(self, client: openai.AsyncOpenAI, expected: list[list[int]], clients: int) -> None:
        self.answered = 0
        self.longest_s = 0.0
        self._client = client
        self._expected = expected
        self._clients = clients
        self._ending = False
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(clients)]

    async def more(self, count: int) -> None:
        """Wait for `count` more answers. Raises a client's error."""
        wanted = self.answered + count
        deadline = time.monotonic() + WITHIN_S
        while self.answered < wanted:
            for task in self._tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < deadline, f"{wanted - self.answered} of {count} answers are missing"
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def _run(self, number: int) -> None:
        while not self._ending:
            which = number % len(self._expected)
            number += self._clients
            began = time.monotonic()
            got = await ask(self._client, prompts()[which], len(self._expected[which]))
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            assert got == self._expected[which], "a token is wrong"
            self.answered += 1
            await asyncio.sleep(PAUSE_S)
