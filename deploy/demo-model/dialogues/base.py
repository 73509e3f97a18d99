"""Dialogues, their texts, and the stream of all generators.

A generator depends only on a `random.Random`, so dialogues are reproducible.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Literal

import yaml

Role = Literal["system", "user", "assistant", "tool"]
TEXTS: dict[str, Any] = yaml.load(Path(__file__).with_name("texts.yaml").read_bytes(), yaml.CSafeLoader)


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
    """A conversation, whose last message is the assistant's."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Generator:
    name: str
    domain: str
    weight: float
    make: Callable[[Random], Dialogue]


GENERATORS: dict[str, Generator] = {}


def register(*modules: ModuleType) -> None:
    """Fill GENERATORS with the modules' functions; texts.yaml has their weights."""
    functions = {name: made for module in modules for name, made in vars(module).items()}
    for name, weight in TEXTS["generators"].items():
        domain, function = name.split(".")
        GENERATORS[name] = Generator(name, domain, weight, functions[function])


def pick(rng: Random, key: str, **slots: Any) -> str:
    """Draw a text of `key`, and fill in its slots."""
    text: str = rng.choice(TEXTS[key])
    return text.format(**slots)


def turn(question: str, reply: str) -> Dialogue:
    """Return a dialogue of a question and a reply."""
    return Dialogue((Message("user", question), Message("assistant", reply)))


def is_held_out(dialogue: Dialogue) -> bool:
    """Return whether a dialogue is for validation: one in 40, by a hash of the user's messages."""
    words = "\n".join(m.content for m in dialogue.messages if m.role == "user")
    return zlib.crc32(words.encode()) % 40 == 0


def _with_system_prompt(rng: Random, dialogue: Dialogue) -> Dialogue:
    if dialogue.messages[0].role == "system" or rng.random() < 0.5:
        return dialogue
    prompts = TEXTS["system_prompts"]
    prompt = prompts[0] if rng.random() < 0.5 else rng.choice(prompts)
    return replace(dialogue, messages=(Message("system", prompt), *dialogue.messages))


def stream(seed: int, *, held_out: bool = False, domain: str | None = None) -> Iterator[tuple[str, Dialogue]]:
    """Yield endless pairs of domain and dialogue; one in six joins several dialogues.

    held_out: yield only single dialogues for validation, otherwise only training dialogues. domain: yield
    only dialogues of this domain.
    """
    rng = Random(f"{seed}/{held_out}")
    chosen = [g for g in GENERATORS.values() if domain in (None, g.domain)]
    cumulative = list(itertools.accumulate(g.weight for g in chosen))

    def draw() -> tuple[str, Dialogue]:
        source = rng.choices(chosen, cum_weights=cumulative)[0]
        return source.domain, source.make(rng)

    while True:
        source, dialogue = draw()
        if is_held_out(dialogue) is not held_out:
            continue
        if held_out:
            yield source, dialogue
            continue
        if not dialogue.tools and rng.random() < 0.17:
            messages = dialogue.messages
            for _ in range(rng.randint(1, 4)):
                _, more = draw()
                if not more.tools and more.messages[0].role != "system" and not is_held_out(more):
                    messages += more.messages
            dialogue = Dialogue(messages)
        yield source, _with_system_prompt(rng, dialogue)
