"""Clients whose requests break engines' steps, besides the normal load. Such requests may fail but must end.

Some requests are marked for the plug-in of harness/poison, which breaks any engine's step. The others are
ordinary requests that once broke engines or kept them busy.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from harness.chaos.site import Site
from harness.deployment import MODEL_NAME
from harness.poison import dose

ENDS_S = 90.0  # timeout of a request
PAUSE_S = (0.2, 1.0)  # minimum and maximum pause between a client's requests
FATAL = 3  # limit of requests that end their engine's process; each may end two
PLACES = ("schedule", "execute", "forward", "sample", "draft", "update", "post")
REFUSED, BROKEN, OVER = (400, 422), (500, 422), (503, 504)

Body = dict[str, Any]
Draw = Callable[[random.Random], list[Body]]


@dataclass(frozen=True)
class Kind:
    """Requests that are sent together, and their allowed statuses in addition to OVER."""

    name: str
    bodies: Draw
    statuses: tuple[int, ...]


def _body(draw: random.Random, **more: Any) -> Body:
    prompt = draw.choices(range(20, 400), k=draw.randint(20, 200))
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 60, "temperature": 0, **more}


def _alone(draw: random.Random) -> list[Body]:
    marks = dose("alone", draw.choice(PLACES), draw.choice((0, 0, 1, 5, 20)))
    return [_body(draw, vllm_xargs=marks, ignore_eos=True)]


def _pair(draw: random.Random) -> list[Body]:
    marks = dose("pair", draw.choice(PLACES), draw.choice((0, 1, 5, 20)))
    return [_body(draw, vllm_xargs=marks, ignore_eos=True) for _ in range(2)]


def _fatal(draw: random.Random) -> list[Body]:
    return [_body(draw, vllm_xargs=dose("sticky", "sample", draw.choice((0, 3))), ignore_eos=True)]


def _token_logprobs(draw: random.Random) -> list[Body]:
    """Return requests with log-probability fields that a batch once could not combine."""
    return [_body(draw, logprobs=1, logprob_token_ids=[5], max_tokens=200), _body(draw, logprobs=3)]


def _grammar(draw: random.Random) -> list[Body]:
    recursive = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    grammars = ({"json": recursive}, {"grammar": "root ::= root"}, {"regex": r"[^\s\S]"})
    return [_body(draw, structured_outputs=draw.choice(grammars))]


def _schema(draw: random.Random) -> list[Body]:
    """Return a request with a schema that is slow to compile."""
    fields = {f"f{number}": {"type": "string", "maxLength": 200 + number} for number in range(60)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return [_body(draw, structured_outputs={"json": schema})]


def _many_logprobs(draw: random.Random) -> list[Body]:
    return [_body(draw, logprobs=draw.choice((20, 10_000)), prompt_logprobs=20)]


KINDS = (
    Kind("alone", _alone, BROKEN),
    Kind("alone", _alone, BROKEN),
    Kind("pair", _pair, (200, *BROKEN)),
    Kind("token logprobs", _token_logprobs, (200, *REFUSED, *BROKEN)),
    Kind("grammar", _grammar, (200, *REFUSED, *BROKEN)),
    Kind("schema", _schema, (200, *REFUSED)),
    Kind("many logprobs", _many_logprobs, (200, *REFUSED)),
)
DEADLY = Kind("fatal", _fatal, BROKEN)


@dataclass
class Poisoners:
    """The poisonous clients of one run and their answers."""

    site: Site
    seed: str
    answers: Counter[str] = field(default_factory=Counter)  # "kind status" -> requests
    problems: list[str] = field(default_factory=list)
    fatal: int = 0
    _numbers: Any = field(default_factory=itertools.count)

    async def client(self, http: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(f"{self.seed} poison {number}")
        again: tuple[Kind, list[Body]] | None = None
        while True:
            kind, bodies = again or self._next(draw)
            await asyncio.gather(*(self._send(http, kind, body) for body in bodies))
            # Half of the time, the same requests are sent again.
            again = (kind, bodies) if again is None and draw.random() < 0.5 else None
            await asyncio.sleep(draw.uniform(*PAUSE_S))

    def _next(self, draw: random.Random) -> tuple[Kind, list[Body]]:
        if self.fatal < FATAL and draw.random() < 0.1:
            self.fatal += 1
            return DEADLY, DEADLY.bodies(draw)
        kind = draw.choice(KINDS)
        return kind, kind.bodies(draw)

    async def _send(self, http: aiohttp.ClientSession, kind: Kind, body: Body) -> None:
        number = next(self._numbers)
        router = self.site.routers[number % len(self.site.routers)]
        try:
            async with asyncio.timeout(ENDS_S):
                async with http.post(f"{self.site.url(router)}/v1/completions", json=body) as response:
                    text, status = await response.text(), response.status
        except TimeoutError:
            self.problems.append(f"{kind.name} {number}: no answer within {ENDS_S:g} s")
            return
        except aiohttp.ClientError as problem:
            self.answers[f"{kind.name} {type(problem).__name__}"] += 1
            return
        self.answers[f"{kind.name} {status}"] += 1
        if status not in (*kind.statuses, *OVER):
            marks = body.get("vllm_xargs", "")
            self.problems.append(f"{kind.name} {number} {marks}: HTTP {status}: {text[:200]}")

    def judge(self) -> list[str]:
        """Return problems with the answers and with the number of ended engines."""
        ended = self.site.engines_failed
        most = 2 * self.fatal
        if ended > most:
            return [*self.problems, f"{self.fatal} fatal requests ended {ended} engines, more than {most}"]
        return self.problems


@asynccontextmanager
async def poisoners(site: Site, clients: int, seed: str) -> AsyncIterator[Poisoners]:
    found = Poisoners(site, seed)
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        tasks = [asyncio.create_task(found.client(http, number)) for number in range(clients)]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()):
            raise error
