"""Clients that each send one request at a time, and the check of their answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp

from harness.chaos.questions import Case, Questions
from harness.chaos.site import Site
from harness.chaos.victims import Part

DEADLINE_S = 120.0  # limit of a request, including all retries
MOST_WAIT_S = 2.0  # longest wait after a 503, whatever Retry-After says
END_S = 150.0  # timeout for the last answers


class Fate(Enum):
    RIGHT = "right"
    WRONG = "wrong"  # has a token that an undisturbed answer does not have
    FAILED = "failed"  # an error or an incomplete answer
    ROUTER_LOST = "router lost"  # its router was killed, which loses the request


@dataclass(eq=False)
class Answer:
    """A request and its answer so far. Times are time.monotonic's."""

    request_id: str
    case: Case
    router: Part
    sent: float  # when the admitted try was sent
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # when each event with tokens arrived
    ended: float = 0.0
    finish: str = ""
    error: str = ""
    refused: list[float] = field(default_factory=list)  # when a 503 arrived
    router_lost: bool = False

    def pauses(self) -> list[tuple[float, float]]:
        """Return (start, end) of each wait of a stream's client.

        The wait for batch work's first token does not count, because batch work is queued on purpose.
        """
        if not self.case.stream:
            return []
        begin = self.arrivals[0] if self.case.batch and self.arrivals else self.sent
        return list(itertools.pairwise([begin, *self.arrivals, self.ended]))


def judge(answer: Answer, expected: list[int]) -> tuple[Fate, str]:
    """Return a request's fate, and the reason if it is not RIGHT."""
    got = answer.tokens
    for at, (one, right) in enumerate(zip(got, expected, strict=False)):
        if one != right:
            return Fate.WRONG, f"{answer.request_id}: token {at} is {one}, not {right}"
    if len(got) > len(expected):
        return Fate.WRONG, f"{answer.request_id}: {len(got) - len(expected)} tokens too many"
    if answer.router_lost:
        return Fate.ROUTER_LOST, f"{answer.request_id}: {answer.router.name} died: {answer.error}"
    if answer.error:
        return Fate.FAILED, f"{answer.request_id}, {len(got)} tokens: {answer.error}"
    if len(got) < len(expected) or answer.finish != "length":
        how = answer.finish or "without a reason"
        return Fate.FAILED, f"{answer.request_id}: ended ({how}) after {len(got)} of {len(expected)} tokens"
    return Fate.RIGHT, ""


class Load:
    """The clients. `running` and `over` have their unfinished and finished answers."""

    def __init__(
        self, site: Site, questions: Questions, clients: int, seed: str, *, long: bool = False
    ) -> None:
        self.site = site
        self.running: dict[str, Answer] = {}
        self.over: list[Answer] = []
        self.tokens = 0  # received so far
        self._questions = questions
        self._seed = seed
        self._clients = clients
        self._long = long
        self._stopping = False
        self._waiting: list[tuple[Callable[[Answer], bool], asyncio.Future[Answer]]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Load:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        # A connection per request, because one that a dying router closed would fail a later request.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=connector)
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.wait(self._tasks, timeout=END_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for answer in list(self.running.values()):
            self._end(answer, f"no end within {END_S:g} s")
        if self._http is not None:
            await self._http.close()
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()):
                raise error

    @property
    def progress(self) -> str:
        return f"{len(self.over)} answers, {len(self.running)} under way, {self.tokens} tokens"

    async def event(self, wanted: Callable[[Answer], bool], within_s: float) -> Answer | None:
        """Wait until an answer gets a token and meets `wanted`; return None after `within_s`."""
        entry = (wanted, coming := asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            return await asyncio.wait_for(coming, within_s)
        except TimeoutError:
            return None
        finally:
            self._waiting.remove(entry)

    def expected(self, answer: Answer) -> list[int]:
        return self._questions.expected(answer.case)

    # -- clients

    async def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed} client {number}")
        count = 0
        while not self._stopping:
            case = self._questions.draw(draw, long=self._long)
            await self._ask(f"chaos-{number}-{count}.", case, self._router(number + count))
            count += 1

    def _router(self, turn: int) -> Part:
        """Choose a ready router, as a load balancer with health checks does."""
        ready = [one for one in self.site.routers if not (one.wanted and one.away)] or self.site.routers
        return ready[turn % len(ready)]

    async def _ask(self, request_id: str, case: Case, router: Part) -> None:
        began = time.monotonic()
        answer = Answer(request_id, case, router, began)
        self.running[request_id] = answer
        error = ""
        try:
            while True:
                answer.sent = time.monotonic()
                if answer.sent > began + DEADLINE_S:
                    error = f"not admitted within {DEADLINE_S:g} s"
                    break
                try:
                    wait_s = await self._try(answer)
                except aiohttp.ClientConnectorError as nobody:
                    others = [one for one in self.site.routers if one is not answer.router]
                    if not others:
                        error = f"{nobody}"
                        break
                    answer.router = others[0]  # a load balancer would do the same
                    wait_s = 0.05
                if wait_s is None:
                    break
                await asyncio.sleep(wait_s)
        except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"
            answer.router_lost = answer.router.killed
        self._end(answer, error)

    def _end(self, answer: Answer, error: str) -> None:
        answer.ended = time.monotonic()
        answer.error = answer.error or error
        self.running.pop(answer.request_id, None)
        self.over.append(answer)

    async def _try(self, answer: Answer) -> float | None:
        """Send the request once. Return the seconds until a retry, or None if none is needed."""
        if self._http is None:
            raise RuntimeError("the load has not begun")
        headers = {"X-Request-Id": answer.request_id}
        url = self.site.url(answer.router) + answer.case.path
        async with self._http.post(url, json=answer.case.body(), headers=headers) as response:
            if response.status == 503:
                answer.refused.append(time.monotonic())
                await response.read()
                return min(MOST_WAIT_S, float(response.headers.get("Retry-After", MOST_WAIT_S)))
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return None
            if not answer.case.stream:
                self._take(answer, await response.json())
                return None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self._take(answer, json.loads(line[6:]))
        return None

    def _take(self, answer: Answer, event: dict[str, Any]) -> None:
        if "error" in event:
            answer.error = f"{event['error']}"[:400]
            return
        if not event["choices"]:
            return
        choice = event["choices"][0]
        ids = choice.get("token_ids") or []
        answer.tokens += ids
        self.tokens += len(ids)
        answer.finish = choice.get("finish_reason") or answer.finish
        if ids:
            answer.arrivals.append(time.monotonic())
            for wanted, coming in self._waiting:
                if not coming.done() and wanted(answer):
                    coming.set_result(answer)
