"""The method `copy`: draft what followed the current token when it was last seen in the request."""

# ruff: noqa: ARG002 (the interface has more than this method needs)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.services.decode.proposers.drafting import DraftBatch, Proposal
from baton.services.decode.proposers.hosted import TokenMethod
from baton.services.errors import ConfigError
from baton.services.speculation import SpeculativeSettings


class Copy(TokenMethod):
    name = "copy"

    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        return frozenset({"parameters"})

    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        if unknown := set(spec.parameters) - {"most"}:
            raise ConfigError(f"copy: parameter {min(unknown)!r} is not known; there is: most")

    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> CopyProposer:
        return CopyProposer(min(spec.limit, spec.parameters.get("most", spec.limit)))


class CopyProposer:
    def __init__(self, most: int) -> None:
        self.most = most

    def propose(self, batch: DraftBatch) -> Proposal:
        rows = len(batch.lengths)
        tokens, counts = np.zeros((rows, self.most), np.int32), np.zeros(rows, np.int32)
        for row in np.flatnonzero(batch.limits):
            text = batch.tokens[row, : batch.lengths[row]]
            seen = np.flatnonzero(text[:-1] == text[-1])
            if len(seen):
                follows = text[seen[-1] + 1 :][: min(self.most, batch.limits[row])]
                counts[row] = len(follows)
                tokens[row, : len(follows)] = follows
        return Proposal(tokens, counts)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept of a request."""
