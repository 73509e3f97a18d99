"""Draft by prompt lookup (Saxena, 2023): the tokens that followed an earlier occurrence of the last n.

vLLM's own proposer drafts, or with model runner V2 a kernel on the GPU
(services/engine/patches/drafts_v2.py), which takes the most recent of the longest matches.
"""

from __future__ import annotations

from typing import Any, ClassVar

from baton.services.decode.proposers.method import MATCHING, Method
from baton.services.speculation import SpeculativeSettings


class Ngram(Method):
    name: ClassVar[str] = "ngram"

    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        del spec
        return MATCHING

    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        config: dict[str, Any] = {"method": self.name, "num_speculative_tokens": spec.limit}
        config.update({key: value for key in MATCHING if (value := getattr(spec, key)) is not None})
        return config
