"""Draft with a small model of the same vocabulary (Leviathan et al., 2023)."""

from __future__ import annotations

from typing import Any, ClassVar

from baton.services.decode.proposers.checkpoint import check_path, draft_config, number
from baton.services.decode.proposers.method import DRAFT_MODEL, Method, refuse
from baton.services.decode.proposers.wrapped import model_config
from baton.services.speculation import SpeculativeSettings


class DraftModel(Method):
    name: ClassVar[str] = "draft_model"
    keeps_kv: ClassVar[bool] = True

    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        del spec
        return DRAFT_MODEL

    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        draft = draft_config(spec, "a small model of the target's vocabulary")
        check_path(spec, spec.model or "")
        theirs, ours = number(draft, "vocab_size"), number(model, "vocab_size")
        if theirs is not None and ours is not None and theirs != ours:
            raise refuse(
                "model",
                spec,
                f"its vocabulary has {theirs} tokens, the target's {ours}: they must be the same; give a "
                "model of the target's family",
            )

    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        return model_config(spec, self.name)
