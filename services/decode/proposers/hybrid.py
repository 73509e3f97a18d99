"""Combine a draft model with text matches: the model drafts where text is new, the match where it repeats.

After FastDeploy's `mtp_strategy: with_ngram`, with three differences. Long matches come first: they are right
about as often as the model, cost no pass of it, and go on for longer; if nearly all requests have one, the
passes are left out (Arctic Inference prefers suffixes to its draft model in the same way). The model's drafts
may also be continued by suffixes, past outputs included. Without a match nothing is added, so that a step
verifies no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from baton.services.decode.proposers.drafting import DraftBatch, Proposal, Proposer
from baton.services.speculation import SpeculativeSettings

LONGEST, SHORTEST = 4, 2  # sizes of n-grams that continue a draft
# Tokens of a match that replaces the model's drafts. Of the ten tokens that followed a match of six, the demo
# model generated 6 in repetitive text and 4 in chats; after a match of four, 4.7 and 2.5.
LONG = 6
_LONGEST_COMPARED = 16
# An MTP layer is trained to look one token ahead; EAGLE heads are trained on what they drafted themselves.
_STEPS = {"mtp": 1}
_OTHER_STEPS = 2
# As a share of the drafting requests: if this many have long matches, the others get only the token of the
# model's first pass, which it runs over the new tokens anyway. With fewer, its other passes bring more than
# they cost.
_NEARLY_ALL = 0.75


class Hybrid:
    """A Proposer with another one that comes before the draft model."""

    def __init__(self, first: Proposer, then: Proposer, steps: int, least: int) -> None:
        """Take `first` for long matches, and `then` to continue the draft model's `steps` tokens, or one.

        Matches of `first` count from `least` tokens on; it may be the same as `then`.
        """
        self.steps = steps
        self._first = first
        self._then = then
        self._least = least

    def long_matches(self, batch: DraftBatch) -> Proposal:
        """Draft in place of the model; nothing for a row without a long match."""
        found = self._first.propose(batch)
        counts = np.minimum(found.counts, batch.limits)
        counts[counts < self._least] = 0
        return Proposal(found.tokens.copy(), counts)

    def passes(self, drafting: int, matched: int) -> int:
        """Return how many tokens the draft model should make if `matched` of `drafting` rows have a match."""
        return 1 if matched >= _NEARLY_ALL * drafting else self.steps

    def propose(self, batch: DraftBatch) -> Proposal:
        """Continue the rows whose limit is not 0."""
        return self._then.propose(batch)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._then.forget(request_ids)


def model_steps(spec: SpeculativeSettings) -> int:
    """Return how many tokens the draft model makes before the match continues; at most `spec.limit`."""
    return min(spec.limit, spec.num_model_steps or _STEPS.get(spec.method, _OTHER_STEPS))


def hybrid(spec: SpeculativeSettings, vllm_config: Any) -> Hybrid | None:
    """Return what drafts beside the draft model; None if `mtp_strategy` wants nothing."""
    make = _STRATEGIES[spec.mtp_strategy]
    return make(spec, vllm_config) if make else None


def ngram_sizes(spec: SpeculativeSettings) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shortest and the longest n-gram, for long matches and for continuations."""
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

    # A suffix continues for at most its own length (times the factor).
    least = min(max(1, int(LONG * spec.suffix_decoding_max_spec_factor)), spec.limit)
    proposer = suffix_proposer(spec, vllm_config)
    return Hybrid(proposer, proposer, model_steps(spec), least)


_STRATEGIES: dict[str, Callable[[SpeculativeSettings, Any], Hybrid] | None] = {
    "default": None,
    "with_ngram": _ngrams,
    "with_suffix": _suffixes,
}
