"""Common parts of the methods with a draft model that vLLM runs."""

from __future__ import annotations

from typing import Any, ClassVar

from baton.services.decode.proposers.drafting import Proposer
from baton.services.decode.proposers.method import DRAFT_MODEL, MATCHING, SUFFIXES, Method
from baton.services.speculation import SpeculativeSettings

_OPTIONAL = ("quantization", "draft_tensor_parallel_size")


def model_config(spec: SpeculativeSettings, name: str) -> dict[str, Any]:
    """Return vLLM's speculative_config for a method with a draft model."""
    config: dict[str, Any] = {"method": name, "num_speculative_tokens": spec.limit}
    if spec.model:
        config["model"] = spec.model
    config.update({key: value for key in _OPTIONAL if (value := getattr(spec, key)) is not None})
    return config


class Continued(Method):
    """A draft model whose drafts may be continued by matches of `mtp_strategy`: mtp, eagle, eagle3."""

    keeps_kv: ClassVar[bool] = True

    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        keys = DRAFT_MODEL | {"mtp_strategy"}
        if spec.mtp_strategy == "default":
            return keys
        more = MATCHING if spec.mtp_strategy == "with_ngram" else SUFFIXES
        return keys | more | {"num_model_steps"}

    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        return model_config(spec, self.name)

    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer | None:
        if spec.mtp_strategy == "default":
            return None
        from baton.services.decode.proposers.hybrid import hybrid

        return hybrid(spec, vllm_config)
