"""What a speculative decoding method is to Baton: how it is checked, what vLLM is told, who drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from baton.services.decode.proposers.drafting import Proposer
from baton.services.speculation import SpeculativeSettings


class Method(ABC):
    """One method. Stateless; made once a process, by the registry, when a configuration names it.

    A method either leaves drafting to vLLM (`engine_config` names a method of vLLM's), or drafts from tokens
    alone (`proposer` gives who does); the hybrid does both, one after the other.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        """Refuse what cannot work, before anything is loaded.

        `model` is the target's config.json ({} where it is not on this machine's disk). Raises ConfigError
        with the reason and what would work.
        """

    @abstractmethod
    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        """vLLM's own speculative_config. Its num_speculative_tokens is `spec.limit`."""

    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer | None:
        """Who drafts from tokens alone, alone or after the draft model; None: vLLM does it all."""
        del spec, vllm_config
        return None
