"""Define the input and the output of a proposer, which drafts from tokens alone, in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DraftBatch:
    """The requests of one step, a row each. Arrays are the engine's own: read, never write, never keep.

    A row holds the prompt, the output, and in a hybrid the tokens just drafted by the draft model. A request
    may move to another row between steps; its name stays the same.
    """

    request_ids: Sequence[str]
    tokens: Ints  # [rows, at least max(lengths)], C-contiguous
    prompts: Ints  # [rows]: how many of a row's tokens are prompt
    settled: Ints  # [rows]: how many are prompt and output; later ones are drafts and may turn out wrong
    lengths: Ints  # [rows]: how many tokens are valid
    limits: Ints  # [rows]: most tokens to draft; 0 for a row that is not drafted for now


@dataclass(frozen=True)
class Proposal:
    """The drafted tokens: the first counts[r] of row r of `tokens`. Valid until the next call."""

    tokens: Ints  # [rows, k]
    counts: Ints  # [rows], each <= k and <= its row's limit; 0 if nothing is worth verifying


class Proposer(Protocol):
    """Draft for a whole batch at once. Called in the engine's thread, once per step."""

    def propose(self, batch: DraftBatch) -> Proposal:
        """Draft. Must not raise for any batch: an exception ends the engine.

        Called in every step, even with limits of 0: a proposer that keeps state learns from each.
        """

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the state of these requests: they left the engine, and their names do not come again.

        Some names may be unknown to the proposer.
        """
