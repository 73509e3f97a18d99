"""Draft with EAGLE-3 (Li et al., 2025), from the hidden states of three layers of the target."""

from __future__ import annotations

from typing import Any, ClassVar

from baton.services.decode.proposers.checkpoint import draft_config, number
from baton.services.decode.proposers.method import refuse
from baton.services.decode.proposers.wrapped import Continued
from baton.services.speculation import SpeculativeSettings

AUXILIARY = "eagle_aux_hidden_state_layer_ids"
# These inherit EAGLE-3's interface without implementing it: vLLM 0.32 fails in the first step.
_SILENT = frozenset({"MiMoForCausalLM"})


class Eagle3(Continued):
    name: ClassVar[str] = "eagle3"

    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        head = draft_config(spec, "an EAGLE-3 head")
        layers = number(model, "num_hidden_layers")
        nested = head.get("eagle_config") or {}
        if _SILENT & set(model.get("architectures", ())):
            raise refuse(
                "method",
                spec,
                f"vLLM's {model['architectures'][0]} does not provide the hidden states that EAGLE-3 needs; "
                "use the model's MTP layers (method mtp), or serve it as the architecture of its trunk",
            )
        if not head or layers is None or nested.get("use_aux_hidden_state", True) is False:
            return
        given = head.get(AUXILIARY) or nested.get(AUXILIARY)
        # vLLM's default, which suits deep models (model_executor/models/interfaces.py)
        ids = tuple(given) if given else (2, layers // 2, layers - 3)
        if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) > layers:
            where = f"{AUXILIARY} of its config.json is" if given else f"without {AUXILIARY} they would be"
            raise refuse(
                "model",
                spec,
                f"EAGLE-3 uses the hidden states of different layers of the target, which has {layers}; "
                f"{where} {list(ids)}: set it to the layers for which this head was trained",
            )
