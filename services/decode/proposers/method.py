"""Define the interface of a speculative method: its settings, checks, vLLM configuration and proposer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from baton.services.decode.proposers.drafting import Proposer
from baton.services.errors import ConfigError
from baton.services.speculation import SpeculativeSettings

MATCHING = frozenset({"prompt_lookup_max", "prompt_lookup_min"})
SUFFIXES = frozenset(
    {
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    }
)
DRAFT_MODEL = frozenset({"model", "quantization", "draft_tensor_parallel_size"})


class Method(ABC):
    """One method. Stateless; made when a configuration names it.

    A method either leaves drafting to vLLM (`engine_config` names a method of vLLM's), or drafts from tokens
    alone (`proposer` returns a proposer); the hybrid does both, one after the other.
    """

    name: ClassVar[str]
    # Whether its drafter has a KV cache: a prefill worker fills it, and it travels with a handoff. A method
    # that drafts from tokens or from the last hidden state needs no help of a prefill worker.
    keeps_kv: ClassVar[bool] = False
    # Whether it drafts the same number of tokens each step: num_speculative_tokens may not be "auto".
    fixed_length: ClassVar[bool] = False

    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        """Return the settings that this method uses, beside the numbers of tokens and verification.

        Others are refused if set, so that no setting is silently ignored.
        """
        del spec
        return frozenset()

    @abstractmethod
    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        """Refuse settings that cannot work, before anything is loaded.

        `model` is the target's config.json ({} if it is not on this machine's disk). Raises ConfigError with
        the reason and what would work. The keys are checked already.
        """

    @abstractmethod
    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        """Return vLLM's own speculative_config. Its num_speculative_tokens is `spec.limit`."""

    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer | None:
        """Return what drafts from tokens, alone or after the draft model; None if vLLM does everything."""
        del spec, vllm_config
        return None


def refuse(key: str, spec: SpeculativeSettings, why: str) -> ConfigError:
    """Return the error for a value of `engine.speculative_config`; `why` also says what would work."""
    return ConfigError(f"engine.speculative_config.{key} (value {getattr(spec, key)!r}): {why}")
