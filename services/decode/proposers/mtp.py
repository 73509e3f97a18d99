"""Draft with multi-token prediction: layers trained with the target, usually in its checkpoint."""

from __future__ import annotations

from typing import Any, ClassVar

from baton.services.decode.proposers.checkpoint import check_path, draft_config, number
from baton.services.decode.proposers.method import refuse
from baton.services.decode.proposers.wrapped import Continued
from baton.services.speculation import SpeculativeSettings

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
# Model types whose config.json may omit the count; vLLM 0.32 then assumes 1.
_UNCOUNTED = frozenset(
    {
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "longcat_flash"),
        *("step3p5", "step3p7", "exaone_moe", "exaone4_5", "minimax_m3_vl", "minimax_m3_mtp"),
        *("mimo_v2", "mimo_v2_flash", "dots3_note", "gemma4_assistant", "gemma4_unified_assistant"),
    }
)


class Mtp(Continued):
    """The target's own MTP layers, or those of another checkpoint."""

    name: ClassVar[str] = "mtp"

    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        config = draft_config(spec, "the MTP layers") if spec.model else model
        if spec.model:
            check_path(spec, spec.model)
        if not config:
            return
        layers = number(config, *_COUNTS)
        nested = config.get("mtp_config")
        if layers is None and isinstance(nested, dict):
            layers = number(nested, *_COUNTS)
        if not layers and not (layers is None and config.get("model_type") in _UNCOUNTED):
            whose = f"{spec.model!r}" if spec.model else "the model"
            raise refuse(
                "method",
                spec,
                f"{whose} has no MTP layers (config.json: none of {', '.join(_COUNTS)} is above 0); "
                "ngram and suffix work with any model; eagle, eagle3 and draft_model with a draft model",
            )
        if layers and spec.limit > layers and spec.limit % layers:
            most = spec.limit - spec.limit % layers
            key = "max_speculative_tokens" if spec.adaptive else "num_speculative_tokens"
            raise refuse(
                key,
                spec,
                f"{spec.limit} is not a multiple of the model's {layers} MTP layers: "
                f"set it to {most} or {most + layers}",
            )
