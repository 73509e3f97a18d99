"""Held-out prompts for the demo model, from the generators of its training dialogues."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "demo-model"
# Kind of dialogues -> domains. Repetitive answers repeat much of the prompt.
KINDS: dict[str, tuple[str | None, ...]] = {"chat": (None,), "repetitive": ("edits", "extraction", "copying")}
_SEED = 20_000


def dialogues(seed: int, domain: str | None) -> Iterator[Any]:
    """Yield held-out dialogues of a domain, or of all."""
    return (one for _, one in _module("dialogues").stream(seed, held_out=True, domain=domain))


def held_out(kind: str, count: int, *, longest: int = 1200) -> list[list[int]]:
    """Return `count` shuffled prompts as token ids, each of at most `longest` tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "weights" / "tokenizer.json"))
    found: list[list[int]] = []
    for domain in KINDS[kind]:
        texts: dict[str, None] = {}
        wanted = -(-count // len(KINDS[kind]))
        for dialogue in itertools.islice(dialogues(_SEED, domain), 40 * count):
            text = _module("chat").prompt_of(dialogue)
            if len(tokenizer.encode(text).ids) <= longest:
                texts.setdefault(text)
            if len(texts) == wanted:
                break
        found += [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts))]
    random.Random(0).shuffle(found)
    return found[:count]


def _module(name: str) -> Any:
    """Import one of the model's scripts, which import each other by file name."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)
