"""The interface of proposers, which draft from tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DraftBatch:
    """The requests of one step, one per row. The arrays are the engine's: do not write to them or keep them.

    A row holds the prompt, the output and, in a hybrid, the tokens just drafted by the draft model. A request
    may move to another row between steps.
    """

    request_ids: Sequence[str]
    tokens: Ints  # [rows, at least max(lengths)], C-contiguous
    prompts: Ints  # [rows]: how many of a row's tokens are prompt
    settled: Ints  # [rows]: how many are prompt or output; the rest are unverified drafts
    lengths: Ints  # [rows]: how many tokens are valid
    limits: Ints  # [rows]: maximum number of tokens to draft


@dataclass(frozen=True)
class Proposal:
    """The drafted tokens: the first counts[r] of row r. Valid until the next call."""

    tokens: Ints  # [rows, k]
    counts: Ints  # [rows], each at most k and its row's limit; 0 if nothing is worth verifying


class Proposer(Protocol):
    """Drafts for a whole batch at once, in the engine's thread."""

    def propose(self, batch: DraftBatch) -> Proposal:
        """Draft. An exception would end the engine.

        Called in every step, even with limits of 0, so that a proposer with state sees all tokens.
        """

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the state of requests that have left the engine. Some ids may be unknown."""
