"""Let a CPU rank compute its own experts alone.

With expert parallelism the CPU kernel mistakes experts' global numbers for local ones, and crashes. Here it
gets this rank's numbers, and weight 0 for other ranks' experts. A weight that was already applied to the
input stays applied, so such layers are refused.

Leans on: vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.patches.replace import replaces

_APPLY = (
    *("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
    *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
    *("expert_tokens_meta", "apply_router_weight_on_input"),
)


@replaces("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply", *_APPLY)
def _renumber(original: Any, *args: Any, **kwargs: Any) -> None:
    given = dict(zip(_APPLY, args, strict=False)) | kwargs
    if (expert_map := given["expert_map"]) is not None:
        if given["apply_router_weight_on_input"]:
            raise NotImplementedError("expert parallelism on CPUs with apply_router_weight_on_input")
        ids = given["topk_ids"]
        local = expert_map[ids.long()]
        given["topk_weights"] = given["topk_weights"].masked_fill(local < 0, 0.0).contiguous()
        given["topk_ids"] = local.clamp(min=0).to(ids.dtype).contiguous()
    original(**given)
