"""Prompts that the demo model was not trained on, from the generators of its dialogues."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "demo-model"
# Kinds of dialogues. Repetitive answers repeat much of the prompt: edits of code, extraction, copies.
KINDS: dict[str, tuple[str | None, ...]] = {"chat": (None,), "repetitive": ("edits", "extraction", "copying")}


_SEED = 20_000


def _findable() -> None:
    if str(FOLDER) not in sys.path:  # the model's scripts are no package: they import each other by file name
        sys.path.insert(0, str(FOLDER))


def questions(count: int, longest: int = 160) -> list[tuple[str, str]]:
    """Return text prompts with the right answers, of at most `longest` characters; all answers differ."""
    _findable()
    from chat import prompt_of
    from dialogues import stream

    found: dict[str, str] = {}
    for _, dialogue in stream(_SEED, held_out=True, domain="copying"):
        answer = dialogue.messages[-1].content
        if len(answer) <= longest:
            found.setdefault(answer, prompt_of(dialogue))
        if len(found) == count:
            break
    return [(prompt, answer) for answer, prompt in found.items()]


def held_out(kind: str, count: int, *, longest: int = 1200) -> list[list[int]]:
    """Return `count` prompts as token ids, shuffled, each of at most `longest` tokens."""
    _findable()
    from chat import prompt_of
    from dialogues import stream
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "weights" / "tokenizer.json"))
    found: list[list[int]] = []
    for domain in KINDS[kind]:
        texts: dict[str, None] = {}
        wanted = -(-count // len(KINDS[kind]))
        drawn = stream(_SEED, held_out=True, domain=domain)
        for _, dialogue in itertools.islice(drawn, 40 * count):
            text = prompt_of(dialogue)
            if len(tokenizer.encode(text).ids) <= longest:
                texts.setdefault(text)
            if len(texts) == wanted:
                break
        found += [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
    random.Random(0).shuffle(found)
    return found[:count]
