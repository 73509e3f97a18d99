"""Questions with right answers, which are recorded before anything fails and cached on disk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from baton.services.engine.fingerprint import model_fingerprint
from harness import prompts as texts
from harness.architectures import language
from harness.deployment import ENGINE, MODEL_NAME
from harness.pictures import data_url, noise, saved

SHORTEST, LONGEST = 20, 900  # tokens in a prompt
FEWEST, MOST = 16, 300  # tokens in an answer
LIMIT = int(ENGINE["max_model_len"])
AT_ONCE = 8
MOST_SHOWN = 100  # tokens in an answer to a question with images
IMAGES = 8  # questions with one or two images
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "baton-chaos"


@dataclass(frozen=True)
class Case:
    """A question. Decoding is greedy, so an answer is a prefix of every longer one."""

    prompt: tuple[int, ...]
    tokens: int  # the answer's length
    stream: bool
    salt: str = ""  # if set, the prefix cache is not used
    batch: bool = False  # batch work, which yields to interactive requests

    @property
    def images(self) -> tuple[int, ...]:
        """The seeds of its images, which its prompt contains as negative numbers."""
        return tuple(-one for one in self.prompt if one < 0)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.images else "/v1/completions"

    def body(self) -> dict[str, Any]:
        asked = {"messages": [_turn(self.images)]} if self.images else {"prompt": list(self.prompt)}
        return {
            "model": MODEL_NAME,
            **asked,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
            **({"cache_salt": self.salt} if self.salt else {}),
            **({"service_tier": "flex"} if self.batch else {}),
        }


class Questions:
    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        self._prompts = list(known)
        self._known = known

    def draw(self, random: random.Random, *, long: bool = False) -> Case:
        """Draw a case: a quarter may hit the prefix cache, a quarter do not stream, a quarter are batch.

        A `long` case streams the longest answer.
        """
        prompt = random.choice(self._prompts)
        most = min(MOST, len(self._known[prompt]))
        salt = f"{random.getrandbits(64):x}" if random.random() < 0.75 else ""
        if long:
            return Case(prompt, most, stream=True, salt=salt)
        tokens, stream, batch = random.randint(FEWEST, most), random.random() < 0.75, random.random() < 0.25
        return Case(prompt, tokens, stream, salt, batch)

    def expected(self, case: Case) -> list[int]:
        return self._known[case.prompt][: case.tokens]


def _turn(images: tuple[int, ...]) -> dict[str, Any]:
    urls = (data_url(saved(noise(seed))) for seed in images)
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}


def sample(every: int, *, tiny: bool = False, images: bool = False) -> list[tuple[int, ...]]:
    """Return every `every`-th prompt, of all lengths.

    tiny: for the models of harness/architectures. images: add IMAGES questions with images.
    """
    known = texts.prompts()
    if tiny:
        known = [language.prompt(number, length) for number, length in enumerate(texts.LENGTHS)]
    chosen = [tuple(prompt) for prompt in known if SHORTEST <= len(prompt) <= LONGEST]
    shown = [(-1 - number, *([-101 - number] if number % 2 else ())) for number in range(IMAGES)]
    return chosen[::-every] + (shown if images else [])


async def questions(url: str, every: int, model: str = ENGINE["model"], *, images: bool = False) -> Questions:
    """Return prompts with the model's answers. Missing answers are requested at `url`."""
    prompts = sample(every, tiny=model != ENGINE["model"], images=images)
    file = CACHE / f"{_digest(model, prompts)}.json"
    if file.exists():
        answers = json.loads(file.read_text())
    else:
        answers = await take(url, prompts)
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(answers))
        fresh.rename(file)
    return Questions(dict(zip(prompts, answers, strict=True)))


def _digest(model: str, prompts: Sequence[tuple[int, ...]]) -> str:
    content = json.dumps([model_fingerprint(model), ENGINE["dtype"], MOST, prompts])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


async def take(url: str, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    room = asyncio.Semaphore(AT_ONCE)

    async def take(http: aiohttp.ClientSession, prompt: tuple[int, ...]) -> list[int]:
        most = MOST_SHOWN if prompt[0] < 0 else min(MOST, LIMIT - len(prompt))
        case = Case(prompt, most, stream=False)
        async with room, http.post(url + case.path, json=case.body()) as answer:
            body = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"no reference: HTTP {answer.status}: {body}")
            ids: list[int] = body["choices"][0]["token_ids"]
            if len(ids) != case.tokens:
                raise RuntimeError(f"no reference: got {len(ids)} tokens instead of {case.tokens}")
            return ids

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        return list(await asyncio.gather(*(take(http, prompt) for prompt in prompts)))
