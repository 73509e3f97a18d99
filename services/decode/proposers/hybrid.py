"""A draft model's tokens, continued by matches: the model where text is new, the match where it repeats.

After FastDeploy's `mtp_strategy: with_ngram`, with two differences: a continuation may also come from
suffixes, past answers included; and where nothing matches nothing is added, so that a step verifies no
padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.decode.proposers.drafting import Proposer
from baton.services.speculation import SpeculativeSettings

LONGEST, SHORTEST = 4, 2  # n-grams; bench/proposers.py measures others
# An MTP layer is trained to look one token ahead; EAGLE heads are trained on what they drafted themselves.
_STEPS = {"mtp": 1}
_OTHER_STEPS = 2


def model_steps(spec: SpeculativeSettings) -> int:
    """Tokens that the draft model makes before the match continues; at most `spec.limit`."""
    return min(spec.limit, spec.num_model_steps or _STEPS.get(spec.method, _OTHER_STEPS))


def continuation(spec: SpeculativeSettings, vllm_config: Any) -> Proposer | None:
    """Who continues the draft model's tokens; None where `mtp_strategy` wants nobody to."""
    make = _STRATEGIES[spec.mtp_strategy]
    return make(spec, vllm_config) if make else None


def _ngrams(spec: SpeculativeSettings, vllm_config: Any) -> Proposer:
    from baton.services.decode.proposers.matching import NgramMatcher

    longest = spec.prompt_lookup_max or max(LONGEST, spec.prompt_lookup_min or 0)
    shortest = spec.prompt_lookup_min or min(SHORTEST, longest)
    return NgramMatcher(shortest, longest, spec.limit, vllm_config.scheduler_config.max_num_seqs)


def _suffixes(spec: SpeculativeSettings, vllm_config: Any) -> Proposer:
    from baton.services.decode.proposers.suffix import suffix_proposer

    return suffix_proposer(spec, vllm_config)


_STRATEGIES: dict[str, Callable[[SpeculativeSettings, Any], Proposer] | None] = {
    "default": None,
    "with_ngram": _ngrams,
    "with_suffix": _suffixes,
}
