"""Traces: the requests of a simulation, and random conversations of several kinds.

A prompt is represented by the hashes of its blocks, as in the scheduler.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from baton.services.classes import STANDARD, ServiceClass

BLOCK_TOKENS = 64
SPREAD = 0.6  # standard deviation of the logarithm of lengths
_MEAN = 1.1972  # mean of lengths drawn with SPREAD and a median of 1


@dataclass(slots=True)
class Ask:
    """One request. `hashes` are those of the prompt's blocks, and of the answer's if they are known."""

    at: float  # seconds
    prompt: int  # tokens
    output: int
    hashes: list[int]
    conversation: int = 0
    turn: int = 1
    service: ServiceClass = STANDARD


class Trace(ABC):
    """Requests, some of which follow others."""

    block_tokens: int = BLOCK_TOKENS
    seconds: float  # new conversations begin during this time

    @abstractmethod
    def begin(self) -> Iterator[Ask]:
        """Yield the requests that follow no other, by arrival. Call it once."""

    def after(self, ask: Ask, ended: float) -> Ask | None:
        """Return the next request of a conversation whose last answer ended at `ended`, or None."""
        del ask, ended
        return None


@dataclass(frozen=True)
class Kind:
    """A kind of conversation. Lengths are in tokens; those of turns and answers are means of random draws."""

    about: str
    shared: int  # number of shared beginnings
    begin: int  # tokens of a shared beginning
    first: int  # tokens that the first turn adds
    turn: int  # tokens that a later turn adds after the last answer
    output: int
    turns: float  # mean number per conversation
    think_s: float  # mean time from an answer to the next turn


KINDS = {
    "chats": Kind("multi-turn chats with a few system prompts", 8, 1_000, 300, 300, 150, 8, 10.0),
    "shared": Kind("single questions after one of many long system prompts", 64, 3_000, 200, 0, 150, 1, 0.0),
    "agents": Kind("agents whose contexts grow by the outputs of tools", 4, 3_000, 500, 900, 100, 16, 2.0),
    "documents": Kind("a few questions about a long document each", 1, 0, 16_000, 60, 250, 3, 15.0),
    "prompts": Kind("prompts that have nothing in common", 1, 0, 2_000, 0, 150, 1, 0.0),
}


class Conversations(Trace):
    """Conversations of one kind, which begin as a Poisson process.

    The trace starts in the steady state, with conversations under way. Each conversation has its own random
    generator, so it is the same for every policy, however fast its answers come.
    """

    def __init__(
        self,
        kind: Kind,
        per_s: float,
        seconds: float,
        *,
        seed: int = 0,
        most_tokens: int = 1 << 62,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        """Draw `per_s` requests per second. A conversation ends before it exceeds `most_tokens`."""
        self.kind = kind
        self.per_s = per_s
        self.seconds = seconds
        self.block_tokens = block_tokens
        self._seed = seed
        self._most_tokens = most_tokens
        self._draw = _random(seed, 0)
        self._open: dict[int, random.Random] = {}  # conversation -> its random generator
        self._number = 0
        self._beginnings = [self._longer([], kind.begin, self._draw) for _ in range(kind.shared)]

    def begin(self) -> Iterator[Ask]:
        kind, draw, now = self.kind, self._draw, 0.0
        thinking = self.per_s * (1 - 1 / kind.turns) * kind.think_s
        under_way = [self._midway(draw.expovariate(1 / kind.think_s)) for _ in range(round(thinking))]
        under_way.sort(key=lambda ask: ask.at, reverse=True)
        a_second = self.per_s / kind.turns
        while (now := now + draw.expovariate(a_second)) < self.seconds:
            while under_way and under_way[-1].at <= now:
                yield under_way.pop()
            yield self._first(now)
        yield from (ask for ask in reversed(under_way) if ask.at < self.seconds)

    def after(self, ask: Ask, ended: float) -> Ask | None:
        draw = self._open[ask.conversation]
        goes_on = draw.random() >= 1 / self.kind.turns
        pause_s = draw.expovariate(1 / self.kind.think_s) if self.kind.think_s else 0.0
        following = self._next(ask, ended + pause_s) if goes_on else None
        if following is None or following.at >= self.seconds:
            del self._open[ask.conversation]
            return None
        return following

    def _first(self, at: float) -> Ask:
        self._number += 1
        draw = self._open[self._number] = _random(self._seed, self._number)
        prompt = self.kind.begin + _length(draw, self.kind.first)
        return self._ask(at, draw.choice(self._beginnings), prompt, self._number, 1)

    def _next(self, ask: Ask, at: float) -> Ask | None:
        turn = _length(self._open[ask.conversation], self.kind.turn)
        prompt = ask.prompt + ask.output + turn
        if prompt + 2 * self.kind.output > self._most_tokens:
            return None
        return self._ask(at, ask.hashes, prompt, ask.conversation, ask.turn + 1)

    def _midway(self, at: float) -> Ask:
        """Return a turn of a conversation that began before the simulation."""
        ask = self._first(at)
        draw = self._open[ask.conversation]
        while ask.turn < 2 or draw.random() >= 1 / self.kind.turns:
            following = self._next(ask, at)
            if following is None:
                break
            ask = following
        return ask

    def _ask(self, at: float, before: list[int], prompt: int, conversation: int, turn: int) -> Ask:
        draw = self._open[conversation]
        output = max(2, min(_length(draw, self.kind.output), self._most_tokens - prompt))
        return Ask(at, prompt, output, self._longer(before, prompt + output, draw), conversation, turn)

    def _longer(self, hashes: list[int], tokens: int, draw: random.Random) -> list[int]:
        more = tokens // self.block_tokens - len(hashes)
        return hashes + [draw.getrandbits(64) for _ in range(more)]


def _random(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed} {number}")  # noqa: S311 (no secret)


def _length(draw: random.Random, mean: float) -> int:
    return max(1, round(draw.lognormvariate(0, SPREAD) * mean / _MEAN))
