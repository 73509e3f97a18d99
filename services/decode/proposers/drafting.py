"""Drafting from tokens alone: what a proposer gets each step, and what it gives."""

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

    A row reads: prompt, answer, and in a hybrid the tokens that the draft model has just made. Where one
    request stands in another row than in the step before, its name is the same.
    """

    request_ids: Sequence[str]
    tokens: Ints  # [rows, at least max(lengths)], C-contiguous
    prompts: Ints  # [rows]: how many of a row's tokens are prompt
    settled: Ints  # [rows]: how many are prompt and answer; those behind are drafts and may turn out wrong
    lengths: Ints  # [rows]: how many count
    limits: Ints  # [rows]: most tokens to draft; 0 for a row that is not to be drafted for now


@dataclass(frozen=True)
class Proposal:
    """What was drafted: the first counts[r] of row r of `tokens`. Valid until the next call."""

    tokens: Ints  # [rows, k]
    counts: Ints  # [rows], each <= k and <= its row's limit; 0 where nothing is worth verifying


class Proposer(Protocol):
    """Drafts for a whole batch at once. Called in the engine's thread, once a step."""

    def propose(self, batch: DraftBatch) -> Proposal:
        """Draft. Must not raise for any batch: what it raises ends the engine.

        Called in every step, also with limits of 0: a proposer that keeps state learns from each.
        """

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests left the engine; nothing more comes of them under these names.

        Names that the proposer never saw may be among them.
        """
