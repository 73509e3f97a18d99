"""The interface of a speculative method."""

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
    """A speculative method without state: vLLM drafts, a proposer drafts from tokens, or (hybrid) both do."""

    name: ClassVar[str]
    keeps_kv: ClassVar[bool] = False  # its drafter has KV, which prefill workers fill and hand over
    fixed_length: ClassVar[bool] = False  # num_speculative_tokens cannot be "auto"

    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        """Return the settings that this method uses besides the common ones; any other setting is refused."""
        del spec
        return frozenset()

    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        """Raise ConfigError for settings that cannot work. model: the target's config.json, {} if unknown."""
        del spec, model

    @abstractmethod
    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        """Return vLLM's speculative_config, with `spec.limit` as num_speculative_tokens."""

    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer | None:
        """Return the proposer that drafts alone or after the draft model; None if only vLLM drafts."""
        del spec, vllm_config
        return None


def refuse(key: str, spec: SpeculativeSettings, why: str) -> ConfigError:
    """Return a ConfigError about a value of `engine.speculative_config`."""
    return ConfigError(f"engine.speculative_config.{key} (value {getattr(spec, key)!r}): {why}")
