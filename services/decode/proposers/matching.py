"""Match n-grams: propose the tokens that followed the last ones at their previous occurrence in the request.

After prompt lookup decoding (Saxena, 2023). Among the longest matches the most recent is taken: text drifts,
and recent text is the better guess. A continuation that reaches the end of the text goes on with its own
draft, as LZ77 copies do, so that repetitive text is drafted in full.

Tokens on the host are matched here, by the CPU path of `baton.kernels.ngram_match`; those on a GPU there, by
its kernel (services/engine/patches/drafts_v2.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.kernels.ngram_match.cpu import match
from baton.services.decode.proposers.drafting import DraftBatch, Ints, Proposal


class NgramMatcher:
    """A Proposer that keeps no state of requests."""

    def __init__(self, min_n: int, max_n: int, most: int, rows: int) -> None:
        """Match n-grams of min_n to max_n tokens; draft at most `most` for each of up to `rows` requests."""
        self._min_n = min_n
        self._max_n = max_n
        self._tokens: Ints = np.zeros((rows, most), dtype=np.int32)
        self._counts: Ints = np.zeros(rows, dtype=np.int32)

    def propose(self, batch: DraftBatch) -> Proposal:
        """Draft; linear in the tokens of a row, less if a match of max_n tokens lies near the end."""
        rows = len(batch.lengths)
        tokens, counts = self._tokens[:rows], self._counts[:rows]
        match(batch.tokens, batch.lengths, batch.limits, self._min_n, self._max_n, tokens, counts)
        return Proposal(tokens, counts)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Do nothing: nothing is kept."""
