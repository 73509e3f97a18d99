"""Combine a draft model with text matching: the model drafts new text, matching drafts repeated text.

This works like FastDeploy's `mtp_strategy: with_ngram`, with three differences. Long matches replace the
model's drafts: they are accepted about as often, are longer, and if nearly all requests have one, the model's
passes are skipped (Arctic Inference does the same). Drafts may also be continued by suffixes, including those
of past outputs. Without a match nothing is added, so a step verifies no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from baton.services.decode.proposers.drafting import DraftBatch, Proposal, Proposer
from baton.services.speculation import SpeculativeSettings

LONGEST, SHORTEST = 4, 2  # sizes of n-grams that continue a draft
# Length of a match that replaces the model's drafts. After a match of six, the demo model generated 6 of the
# next ten tokens in repetitive text and 4 in chats; after a match of four, 4.7 and 2.5.
LONG = 6
_LONGEST_COMPARED = 16
# An MTP layer is trained to predict one token; EAGLE heads are trained on their own drafts.
_STEPS = {"mtp": 1}
_OTHER_STEPS = 2
# If this part of the drafting requests has long matches, only the model's first pass is run, which it needs
# anyway for its KV. With fewer, the other passes gain more than they cost.
_NEARLY_ALL = 0.75


class Hybrid:
    """A Proposer that continues a draft model's tokens, and a second one that may replace them."""

    def __init__(self, first: Proposer, then: Proposer, steps: int, least: int) -> None:
        """Use drafts of `first` with `least` tokens or more, else `steps` tokens of the model and `then`."""
        self.steps = steps
        self._first = first
        self._then = then
        self._least = least

    def long_matches(self, batch: DraftBatch) -> Proposal:
        """Draft instead of the model; nothing for a row without a long match."""
        found = self._first.propose(batch)
        counts = np.minimum(found.counts, batch.limits)
        counts[counts < self._least] = 0
        return Proposal(found.tokens.copy(), counts)

    def passes(self, drafting: int, matched: int) -> int:
        """Return how many tokens the model should draft if `matched` of `drafting` rows have a long match."""
        return 1 if matched >= _NEARLY_ALL * drafting else self.steps

    def propose(self, batch: DraftBatch) -> Proposal:
        return self._then.propose(batch)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._then.forget(request_ids)


def model_steps(spec: SpeculativeSettings) -> int:
    """Return how many tokens the draft model drafts before a match continues them; at most `spec.limit`."""
    return min(spec.limit, spec.num_model_steps or _STEPS.get(spec.method, _OTHER_STEPS))


def hybrid(spec: SpeculativeSettings, vllm_config: Any) -> Hybrid | None:
    make = _STRATEGIES[spec.mtp_strategy]
    return make(spec, vllm_config) if make else None


def ngram_sizes(spec: SpeculativeSettings) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (shortest, longest) sizes of n-grams, for long matches and for continuations."""
    longest = spec.prompt_lookup_max or max(LONGEST, spec.prompt_lookup_min or 0)
    shortest = spec.prompt_lookup_min or min(SHORTEST, longest)
    return (max(LONG, shortest), max(_LONGEST_COMPARED, longest)), (shortest, longest)


def _ngrams(spec: SpeculativeSettings, vllm_config: Any) -> Hybrid:
    from baton.services.decode.proposers.matching import NgramMatcher

    rows = vllm_config.scheduler_config.max_num_seqs
    first, then = (NgramMatcher(*sizes, spec.limit, rows) for sizes in ngram_sizes(spec))
    return Hybrid(first, then, model_steps(spec), 1)


def _suffixes(spec: SpeculativeSettings, vllm_config: Any) -> Hybrid:
    from baton.services.decode.proposers.suffix import suffix_proposer

    # A draft is at most as long as its suffix (times the factor).
    least = min(max(1, int(LONG * spec.suffix_decoding_max_spec_factor)), spec.limit)
    proposer = suffix_proposer(spec, vllm_config)
    return Hybrid(proposer, proposer, model_steps(spec), least)


_STRATEGIES: dict[str, Callable[[SpeculativeSettings, Any], Hybrid] | None] = {
    "default": None,
    "with_ngram": _ngrams,
    "with_suffix": _suffixes,
}
