"""Propose the tokens that followed the last n-gram at its previous occurrence in the request.

This is prompt lookup decoding (Saxena, 2023) with the most recent of the longest matches. A continuation that
reaches the end of the text continues with its own draft, as in LZ77, so repetitive text is drafted in full.

For tokens on the host. Tokens on a GPU are matched there (services/engine/patches/drafts_v2.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.kernels.ngram_match.cpu import match
from baton.services.decode.proposers.drafting import DraftBatch, Ints, Proposal


class NgramMatcher:
    """A Proposer without state."""

    def __init__(self, min_n: int, max_n: int, most: int, rows: int) -> None:
        """Match n-grams of min_n to max_n tokens; draft at most `most` for each of up to `rows` requests."""
        self._min_n = min_n
        self._max_n = max_n
        self._tokens: Ints = np.zeros((rows, most), dtype=np.int32)
        self._counts: Ints = np.zeros(rows, dtype=np.int32)

    def propose(self, batch: DraftBatch) -> Proposal:
        """Draft, in time linear in the tokens of a row, or less if there is a match of max_n tokens."""
        rows = len(batch.lengths)
        tokens, counts = self._tokens[:rows], self._counts[:rows]
        match(batch.tokens, batch.lengths, batch.limits, self._min_n, self._max_n, tokens, counts)
        return Proposal(tokens, counts)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Do nothing."""
