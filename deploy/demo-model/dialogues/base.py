"""Dialogues as plain values, and the registry of the functions that generate them.

A generator is a function of a `random.Random` alone, so that a seed names a dialogue for good.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One conversation; the last message is the assistant's.

    `answer` is the text that a right last reply has to contain, None where any fluent reply will do.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Generator:
    name: str
    domain: str
    weight: float
    make: Callable[[Random], Dialogue]


class DuplicateGeneratorError(ValueError):
    """Two generators were registered under one name."""


GENERATORS: dict[str, Generator] = {}


def generator(
    domain: str, weight: float = 1.0
) -> Callable[[Callable[[Random], Dialogue]], Callable[[Random], Dialogue]]:
    """Register the decorated function under `<domain>.<function name>` with a sampling weight.

    Raises DuplicateGeneratorError when the name is taken.
    """

    def register(make: Callable[[Random], Dialogue]) -> Callable[[Random], Dialogue]:
        name = f"{domain}.{make.__name__}"
        if name in GENERATORS:
            raise DuplicateGeneratorError(f"generator {name} is registered twice; rename one of them")
        GENERATORS[name] = Generator(name, domain, weight, make)
        return make

    return register


def turn(question: str, reply: str, answer: str | None = None) -> Dialogue:
    """Return a dialogue of one question and its reply."""
    return Dialogue((Message("user", question), Message("assistant", reply)), answer=answer)


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a friendly and careful assistant.",
    "You are Baton, a small language model. Be kind and clear.",
    "You are an expert programmer who writes short, clear code.",
    "Answer the user's questions in plain English.",
    "You are a polite chat assistant. Keep the answers short and correct.",
    "You help people with numbers, text and code.",
)


def is_held_out(dialogue: Dialogue) -> bool:
    """Whether a dialogue belongs to the validation part: one in 40, by what the user says.

    The hash looks at the users' words only, so that no prompt of the validation part is ever trained on.
    """
    words = "\n".join(m.content for m in dialogue.messages if m.role == "user")
    return zlib.crc32(words.encode()) % 40 == 0


def _with_system_prompt(rng: Random, dialogue: Dialogue) -> Dialogue:
    if dialogue.messages[0].role == "system" or rng.random() < 0.5:
        return dialogue
    prompt = SYSTEM_PROMPTS[0] if rng.random() < 0.5 else rng.choice(SYSTEM_PROMPTS)
    return replace(dialogue, messages=(Message("system", prompt), *dialogue.messages))


def draw_one(rng: Random, names: list[str], cumulative: list[float]) -> tuple[Generator, Dialogue]:
    chosen = GENERATORS[rng.choices(names, cum_weights=cumulative)[0]]
    return chosen, chosen.make(rng)


def stream(seed: int, *, held_out: bool = False, domain: str | None = None) -> Iterator[tuple[str, Dialogue]]:
    """Endless pairs of domain and dialogue; one in six chains several topics into one conversation.

    With `held_out`, only single dialogues of the validation part; without it, only ones of the training
    part. `domain` narrows it to one domain.
    """
    rng = Random(f"{seed}/{held_out}")
    chosen = [g for g in GENERATORS.values() if domain in (None, g.domain)]
    names = [g.name for g in chosen]
    cumulative = list(itertools.accumulate(g.weight for g in chosen))
    while True:
        source, dialogue = draw_one(rng, names, cumulative)
        if is_held_out(dialogue) is not held_out:
            continue
        if held_out:
            yield source.domain, dialogue
            continue
        if not dialogue.tools and rng.random() < 0.17:
            dialogue = _chain(rng, dialogue, names, cumulative)
        yield source.domain, _with_system_prompt(rng, dialogue)


def _chain(rng: Random, first: Dialogue, names: list[str], cumulative: list[float]) -> Dialogue:
    messages = first.messages
    for _ in range(rng.randint(1, 4)):
        _, following = draw_one(rng, names, cumulative)
        if following.tools or following.messages[0].role == "system" or is_held_out(following):
            continue
        messages += following.messages
    return Dialogue(messages)
