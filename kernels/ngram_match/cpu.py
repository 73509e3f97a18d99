"""The CPU form of `ngram_match`: loops over arrays, compiled by numba."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from baton.kernels.compiled import compiled

Ints = npt.NDArray[np.int32]

_BLOCK = 1024  # tokens compared at once: the loop becomes SIMD, and hits are rare
# Tokens searched first, because most matches are there. The rest is searched forward, which the CPU
# prefetches: searching 256 rows of 32,768 tokens backward took a third longer.
_RECENT = 4096


def ngram_match(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    *,
    min_n: int,
    max_n: int,
    rows: torch.Tensor | None = None,
    tails: torch.Tensor | None = None,
) -> None:
    """Like `baton.kernels.ngram_match.ngram_match`. Copies the texts if `rows` or `tails` are given."""
    texts = tokens.numpy() if rows is None else tokens[rows].numpy()
    sizes = lengths.numpy() if rows is None else lengths[rows].numpy()
    batch = limits.shape[0]
    texts, sizes = texts[:batch], sizes[:batch]
    if tails is not None:
        longer = np.zeros((batch, texts.shape[1] + tails.shape[1]), dtype=np.int32)
        longer[:, : texts.shape[1]] = texts
        places = sizes[:, None] + np.arange(tails.shape[1], dtype=np.int32)
        np.put_along_axis(longer, places.astype(np.int64), tails.numpy().astype(np.int32), axis=1)
        texts, sizes = longer, sizes + np.int32(tails.shape[1])
    found = np.zeros(drafts.shape, dtype=np.int32)
    numbers = np.zeros(batch, dtype=np.int32)
    match(
        np.ascontiguousarray(texts),
        np.ascontiguousarray(sizes, dtype=np.int32),
        np.ascontiguousarray(limits.numpy(), dtype=np.int32),
        min_n,
        max_n,
        found,
        numbers,
    )
    kept = np.arange(drafts.shape[1]) < numbers[:, None]
    into = drafts.numpy()
    into[kept] = found[kept]
    counts.numpy()[:] = numbers


@compiled()
def _last_longest(text: Ints, low: int, high: int, shortest: int, max_n: int) -> tuple[int, int]:
    """Find the last of the longest matches of at least `shortest` tokens that end in text[low:high].

    Returns its length and the place after it, or two zeros without a match.
    """
    size = text.shape[0]
    last = text[size - 1]
    longest, found = 0, 0
    for begin in range(low, high, _BLOCK):
        block = text[begin : min(begin + _BLOCK, high)]
        hits = 0
        for token in block:
            hits += token == last
        position = begin
        while hits > 0:
            if text[position] == last:
                hits -= 1
                n = 1
                while n < max_n and n <= position and text[position - n] == text[size - 1 - n]:
                    n += 1
                if n >= shortest and n >= longest:
                    longest, found = n, position + 1
            position += 1
    return longest, found


@compiled()
def _continuation(text: Ints, min_n: int, max_n: int) -> int:
    """Return the place where the best match's continuation begins, or 0 without a match."""
    high = text.shape[0] - 1
    low = max(0, high - _RECENT)
    longest, found = _last_longest(text, low, high, min_n, max_n)
    if longest < max_n:
        longer, older = _last_longest(text, 0, low, max(min_n, longest + 1), max_n)
        if longer:
            return older
    return found


@compiled("void(int32[:, ::1], int32[::1], int32[::1], int64, int64, int32[:, ::1], int32[::1])")
def match(  # noqa: PLR0917 (compiled code takes no keywords)
    tokens: Ints, lengths: Ints, limits: Ints, min_n: int, max_n: int, drafts: Ints, counts: Ints
) -> None:
    """Draft for each row as `ngram_match` does, without `rows` and `tails`.

    The time is linear in a row's tokens, and less if a match of max_n tokens is near the end.
    """
    for row in range(lengths.shape[0]):
        counts[row] = 0
        limit = min(limits[row], drafts.shape[1])
        if limit <= 0 or lengths[row] <= min_n:
            continue
        text = tokens[row, : lengths[row]]
        start = _continuation(text, min_n, max_n)
        if start == 0:
            continue
        for i in range(limit):
            source = start + i
            drafts[row, i] = text[source] if source < text.shape[0] else drafts[row, source - text.shape[0]]
        counts[row] = limit
