"""Draft with Medusa (Cai et al., 2024): one head per drafted token, on the target's last hidden state."""

from __future__ import annotations

from typing import Any, ClassVar

from baton.services.decode.proposers.checkpoint import check_path, draft_config, number
from baton.services.decode.proposers.method import Method, refuse
from baton.services.decode.proposers.wrapped import model_config
from baton.services.speculation import SpeculativeSettings


class Medusa(Method):
    name: ClassVar[str] = "medusa"
    fixed_length: ClassVar[bool] = True

    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        del spec
        return frozenset({"model", "quantization"})

    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        del model
        draft = draft_config(spec, "the Medusa heads")
        check_path(spec, spec.model or "")
        heads = number(draft, "num_heads", "medusa_num_heads")
        if heads is not None and heads != spec.limit:
            raise refuse(
                "num_speculative_tokens",
                spec,
                f"this model has {heads} heads, and each drafts one token: set it to {heads}",
            )

    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        return model_config(spec, self.name)
