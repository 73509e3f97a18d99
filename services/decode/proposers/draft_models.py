"""The methods in which vLLM runs a draft model: draft_model, medusa, eagle, eagle3, mtp."""

from __future__ import annotations

from typing import Any, ClassVar

from baton.services.decode.proposers.checkpoint import check_path, draft_config, number
from baton.services.decode.proposers.drafting import Proposer
from baton.services.decode.proposers.method import DRAFT_MODEL, MATCHING, SUFFIXES, Method, refuse
from baton.services.speculation import SpeculativeSettings

_OPTIONAL = ("quantization", "draft_tensor_parallel_size")


class WithModel(Method):
    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        del spec
        return DRAFT_MODEL

    def engine_config(self, spec: SpeculativeSettings) -> dict[str, Any]:
        config: dict[str, Any] = {"method": self.name, "num_speculative_tokens": spec.limit}
        if spec.model:
            config["model"] = spec.model
        config.update({key: value for key in _OPTIONAL if (value := getattr(spec, key)) is not None})
        return config


class DraftModel(WithModel):
    """A small model with the target's vocabulary (Leviathan et al., 2023)."""

    name: ClassVar[str] = "draft_model"
    keeps_kv: ClassVar[bool] = True

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


class Medusa(WithModel):
    """One head per drafted token, on the target's last hidden state (Cai et al., 2024)."""

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


class Continued(WithModel):
    """A draft model whose drafts may be continued by matches of `mtp_strategy`."""

    keeps_kv: ClassVar[bool] = True

    def keys(self, spec: SpeculativeSettings) -> frozenset[str]:
        keys = DRAFT_MODEL | {"mtp_strategy"}
        if spec.mtp_strategy == "default":
            return keys
        more = MATCHING if spec.mtp_strategy == "with_ngram" else SUFFIXES
        return keys | more | {"num_model_steps"}

    def proposer(self, spec: SpeculativeSettings, vllm_config: Any) -> Proposer | None:
        if spec.mtp_strategy == "default":
            return None
        from baton.services.decode.proposers.hybrid import hybrid

        return hybrid(spec, vllm_config)


class Eagle(Continued):
    """One layer on the target's last hidden states (Li et al., 2024)."""

    name: ClassVar[str] = "eagle"

    def check(self, spec: SpeculativeSettings, model: dict[str, Any]) -> None:
        del model
        draft_config(spec, "an EAGLE head")


_AUXILIARY = "eagle_aux_hidden_state_layer_ids"
# These architectures inherit EAGLE-3's interface without implementing it: vLLM 0.32 fails in the first step.
_SILENT = frozenset({"MiMoForCausalLM"})


class Eagle3(Continued):
    """A head on the hidden states of three layers of the target (Li et al., 2025)."""

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
        given = head.get(_AUXILIARY) or nested.get(_AUXILIARY)
        # vLLM's default, which suits deep models (model_executor/models/interfaces.py)
        ids = tuple(given) if given else (2, layers // 2, layers - 3)
        if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) > layers:
            where = f"{_AUXILIARY} of its config.json is" if given else f"without {_AUXILIARY} they would be"
            raise refuse(
                "model",
                spec,
                f"EAGLE-3 uses the hidden states of different layers of the target, which has {layers}; "
                f"{where} {list(ids)}: set it to the layers for which this head was trained",
            )


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
    """Multi-token prediction layers, of the target itself or of another checkpoint."""

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
