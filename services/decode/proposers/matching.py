"""N-gram matches: what followed the last tokens when they were last seen in the same request.

After prompt lookup decoding (Saxena, 2023). Among the longest matches the most recent is taken: text drifts,
and what was written last is the better guess. A continuation that reaches the end of the text goes on with
what it has drafted, as LZ77 copies do, so that text which repeats itself is drafted in full.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.services.decode.proposers.compiled import compiled
from baton.services.decode.proposers.drafting import DraftBatch, Drafts, Ints

_BLOCK = 1024  # tokens compared at once: that loop becomes SIMD, and the loop over hits is rare
# Looked at first; most matches lie there. The rest is read forward, as memory is read ahead: backward, 256
# rows of 32,768 tokens took a third longer.
_RECENT = 4096


class NgramMatcher:
    """A Proposer that keeps nothing of a request."""

    def __init__(self, min_n: int, max_n: int, most: int, rows: int) -> None:
        """Match n-grams of min_n to max_n tokens; draft at most `most` for each of up to `rows` requests."""
        self._min_n = min_n
        self._max_n = max_n
        self._tokens: Ints = np.zeros((rows, most), dtype=np.int32)
        self._counts: Ints = np.zeros(rows, dtype=np.int32)

    def propose(self, batch: DraftBatch) -> Drafts:
        """Linear in the tokens of a row, less where a match of max_n tokens lies near the end."""
        rows = len(batch.lengths)
        tokens, counts = self._tokens[:rows], self._counts[:rows]
        match(batch.tokens, batch.lengths, batch.limits, self._min_n, self._max_n, tokens, counts)
        return Drafts(tokens, counts)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept."""


@compiled()
def _last_longest(text: Ints, low: int, high: int, shortest: int, max_n: int) -> tuple[int, int]:
    """The longest match that ends in text[low:high], of at least `shortest` tokens, and the last of its kind.

    Returns its length and the place behind it; a length of 0 and 0 without one.
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
    """Where what followed the best match begins; 0 without a match."""
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
    """Continue each row of tokens [rows, width] by its most recent longest match.

    lengths [rows]: tokens that count. limits [rows]: most drafts. Fills drafts [rows, k] and counts [rows]:
    the drafts of a row are min(limit, k) tokens, or none where its last min_n tokens were not seen before.
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
