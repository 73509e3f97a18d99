"""Training text as flat arrays of token ids: generated dialogues, Python source, and its documentation.

Each domain has a training and a held-out part. Held out are whole files by a hash of their path, and
dialogues by a hash of what the user says.
"""

from __future__ import annotations

import ast
import itertools
import os
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

TEXT_DOMAINS = ("code", "prose")
DOMAINS = ("dialogues", *TEXT_DOMAINS)
# Share of the rows of a batch. Dialogues are never seen twice; the text is, so it weighs less.
DOMAIN_SHARES = {"dialogues": 0.86, "code": 0.08, "prose": 0.06}
# Tests and generated tables teach little; packages installed by others carry licences of their own.
_SKIPPED = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "lib2to3",
        "encodings",
        "pydoc_data",
    }
)
# Text of the user and the system has a low weight in the loss: it cannot be predicted, yet it is English.
PROMPT_WEIGHT = 0.1
_WEIGHT_UNITS = 10


@dataclass(frozen=True, slots=True)
class Tokens:
    """The documents of a domain, end to end.

    `ids` [N] token ids; `weights` [N] loss weights in tenths; `starts` [D] where each document begins.
    """

    ids: NDArray[np.uint16]
    weights: NDArray[np.uint8]
    starts: NDArray[np.int64]

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, ids=self.ids, weights=self.weights, starts=self.starts)
        os.replace(partial, path)

    def places(self, start: int, count: int) -> NDArray[np.int64]:
        """Return each token's position in its document, as far as the window of `count` from `start` has it."""
        index = np.arange(start, start + count)
        begun = self.starts[np.searchsorted(self.starts, index, side="right") - 1]
        places: NDArray[np.int64] = index - np.maximum(begun, start)
        return places

    @staticmethod
    def load(path: Path) -> Tokens:
        with np.load(path) as saved:
            return Tokens(saved["ids"], saved["weights"], saved["starts"])


def _library_files() -> Iterator[tuple[str, str]]:
    """Yield relative path and text of the standard library's source files, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED.isdisjoint(relative.parts) and path.stat().st_size < 300_000:
            yield relative.as_posix(), path.read_text(encoding="utf-8", errors="ignore")


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


def library_texts(domain: str, *, held_out: bool) -> Iterator[str]:
    """Yield the texts of `code` (source files) or `prose` (longer docstrings, pydoc's language reference)."""
    for name, source in _library_files():
        if (zlib.crc32(name.encode()) % 40 == 0) is not held_out:
            continue
        if domain == "code":
            yield source
        else:
            yield from _docstrings(source)
    if domain == "prose":
        from pydoc_data.topics import topics

        for name, text in topics.items():
            if (zlib.crc32(name.encode()) % 40 == 0) is held_out:
                yield text


def packed(
    documents: Iterable[list[tuple[list[int], int]]], separator: int, separator_weight: int | None = None
) -> Tokens:
    """Join documents, each pieces of tokens and their weight in tenths, with `separator` after each of them.

    The separator weighs as much as the last piece where `separator_weight` is None.
    """
    ids: list[NDArray[np.uint16]] = []
    weights: list[NDArray[np.uint8]] = []
    starts, total = [], 0
    for document in documents:
        starts.append(total)
        flat = [token for piece, _ in document for token in piece] + [separator]
        last = document[-1][1] if separator_weight is None else separator_weight
        marks = [mark for piece, mark in document for _ in piece] + [last]
        ids.append(np.array(flat, dtype=np.uint16))
        weights.append(np.array(marks, dtype=np.uint8))
        total += len(flat)
    return Tokens(np.concatenate(ids), np.concatenate(weights), np.array(starts, dtype=np.int64))


def text_tokens(tokenizer: Tokenizer, domain: str, *, held_out: bool) -> Tokens:
    separator = token_id(tokenizer, END_OF_TEXT)
    texts = library_texts(domain, held_out=held_out)
    return packed(([(tokenizer.encode(text).ids, _WEIGHT_UNITS)] for text in texts), separator)


def dialogue_tokens(
    tokenizer: Tokenizer, count: int, seed: int, *, held_out: bool, domain: str | None = None
) -> Tokens:
    """Yield `count` dialogues from `seed`; only the assistant's text has full weight in the loss."""
    separator = token_id(tokenizer, END_OF_TEXT)
    dialogues = itertools.islice(stream(seed, held_out=held_out, domain=domain), count)

    def documents() -> Iterator[list[tuple[list[int], int]]]:
        while chunk := list(itertools.islice(dialogues, 2000)):
            pieces = [segments(dialogue) for _, dialogue in chunk]
            flat = tokenizer.encode_batch_fast([text for piece in pieces for text, _ in piece])
            encoded = iter(flat)
            for piece in pieces:
                yield [
                    (next(encoded).ids, _WEIGHT_UNITS if target else round(_WEIGHT_UNITS * PROMPT_WEIGHT))
                    for _, target in piece
                ]

    return packed(documents(), separator)


def windows(tokens: Tokens, length: int) -> NDArray[np.int64]:
    """Return starts of windows of `length` + 1 tokens: each begins with a document, except within longer ones.

    A document cut off by one window is begun again by the next, so that short dialogues are seen whole.
    """
    found, start, end = [], 0, len(tokens.ids) - length - 1
    while start <= end:
        found.append(start)
        following = int(tokens.starts[np.searchsorted(tokens.starts, start + length, side="right") - 1])
        start = following if following > start else start + length
    return np.array(found, dtype=np.int64)


class WindowOrder:
    """A walk over a domain's windows of one length in a shuffled order, epoch after epoch.

    The place in the walk is one number, `position`, which a checkpoint keeps.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int) -> None:
        self._starts = windows(tokens, length)
        self._seed = seed
        self._epoch, self._shuffled = -1, np.empty(0, dtype=np.int64)
        self.position = 0

    def __len__(self) -> int:
        return len(self._starts)

    def next(self) -> int:
        """Return the start of the next window and advance `position`."""
        epoch, index = divmod(self.position, len(self._starts))
        self.position += 1
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = np.random.default_rng([self._seed, epoch]).permutation(self._starts)
        return int(self._shuffled[index])
