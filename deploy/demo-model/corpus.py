"""Training text as arrays of token ids: generated dialogues, Python source and documentation."""

from __future__ import annotations

import ast
import itertools
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from chat import END_OF_TEXT, segments
from dialogues import stream
from numpy.typing import NDArray
from tokenizer import token_id
from tokenizers import Tokenizer

# Shares of a batch's rows. Dialogues are never repeated; the other text is, so it has a small share.
SHARES = {"dialogues": 0.86, "code": 0.08, "prose": 0.06}
# Tests and generated tables teach little, and installed packages have other licences.
_SKIPPED = frozenset(
    "test tests idle_test site-packages dist-packages __pycache__ lib2to3 encodings pydoc_data".split()
)
# Loss weights in tenths. Prompts cannot be predicted, but are English text.
_REPLY, _PROMPT = 10, 1
Pieces = list[tuple[list[int], int]]  # tokens and their weight


@dataclass(frozen=True, slots=True)
class Tokens:
    """The documents of a domain, concatenated.

    `ids` [N] token ids; `weights` [N] loss weights in tenths; `starts` [D] where each document begins.
    """

    ids: NDArray[np.uint16]
    weights: NDArray[np.uint8]
    starts: NDArray[np.int64]

    def places(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the tokens' positions in their documents; the first document counts from `start`."""
        index = np.arange(start, start + count)
        begun = self.starts[np.searchsorted(self.starts, index, side="right") - 1]
        places: NDArray[np.int64] = index - np.maximum(begun, start)
        return places


def library_texts(domain: str) -> Iterator[str]:
    """Yield the standard library's source (`code`), or its longer docstrings and pydoc's topics (`prose`).

    One in 40 files and topics is left out, by a hash of the name.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        small = _SKIPPED.isdisjoint(name.parts) and path.stat().st_size < 300_000
        if small and zlib.crc32(name.as_posix().encode()) % 40:
            source = path.read_text(encoding="utf-8", errors="ignore")
            yield from [source] if domain == "code" else _docstrings(source)
    if domain == "prose":
        from pydoc_data.topics import topics

        yield from (text for name, text in topics.items() if zlib.crc32(name.encode()) % 40)


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a file kept for an older or broken grammar
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 120:
                yield text


def packed(documents: Iterable[Pieces], separator: int, separator_weight: int | None = None) -> Tokens:
    """Join documents, each followed by `separator`, which has by default the weight of the last piece."""
    ids, weights, starts, total = [], [], [], 0
    for document in documents:
        starts.append(total)
        last = document[-1][1] if separator_weight is None else separator_weight
        pieces = [*document, ([separator], last)]
        ids.append(np.array([token for piece, _ in pieces for token in piece], dtype=np.uint16))
        weights.append(np.array([weight for piece, weight in pieces for _ in piece], dtype=np.uint8))
        total += len(ids[-1])
    return Tokens(np.concatenate(ids), np.concatenate(weights), np.array(starts, dtype=np.int64))


def training_tokens(tokenizer: Tokenizer, dialogues: int, seed: int) -> dict[str, Tokens]:
    """Encode the training part of every domain."""
    separator = token_id(tokenizer, END_OF_TEXT)
    found = {"dialogues": packed(_encoded(tokenizer, dialogues, seed), separator)}
    for domain in ("code", "prose"):
        texts = library_texts(domain)
        found[domain] = packed(([(tokenizer.encode(text).ids, _REPLY)] for text in texts), separator)
    return found


def _encoded(tokenizer: Tokenizer, count: int, seed: int) -> Iterator[Pieces]:
    dialogues = itertools.islice(stream(seed), count)
    while chunk := [segments(dialogue) for _, dialogue in itertools.islice(dialogues, 2000)]:
        encoded = iter(tokenizer.encode_batch_fast([text for pieces in chunk for text, _ in pieces]))
        for pieces in chunk:
            yield [(next(encoded).ids, _REPLY if target else _PROMPT) for _, target in pieces]


def windows(tokens: Tokens, length: int) -> NDArray[np.int64]:
    """Return the starts of windows of `length` + 1 tokens.

    A window begins with a document, even if the previous window cut it off; only longer documents are split.
    """
    found, start, end = [], 0, len(tokens.ids) - length - 1
    while start <= end:
        found.append(start)
        following = int(tokens.starts[np.searchsorted(tokens.starts, start + length, side="right") - 1])
        start = following if following > start else start + length
    return np.array(found, dtype=np.int64)


def walk(tokens: Tokens, length: int, seed: int) -> Iterator[int]:
    """Yield the starts of a domain's windows in a shuffled order, epoch after epoch."""
    starts = windows(tokens, length)
    for epoch in itertools.count():
        yield from np.random.default_rng([seed, epoch]).permutation(starts).tolist()
