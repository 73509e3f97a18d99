"""Let a CPU rank compute its own experts alone.

Leans on: vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace

_APPLY = (
    *("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
    *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
    *("expert_tokens_meta", "apply_router_weight_on_input"),
)
_WEIGHTS, _IDS, _MAP = (_APPLY.index(name) - 1 for name in ("topk_weights", "topk_ids", "expert_map"))


def install() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    replace(CPUUnquantizedExperts, "apply", renumbering, _APPLY)


def renumbering(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that gives the kernel this rank's numbers, and weight 0 for other ranks' experts.

    A weight that was already applied to the input stays applied, so such layers are refused.
    """

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [*args, *(kwargs.pop(name) for name in _APPLY[1 + len(args) :])]
        if (expert_map := given[_MAP]) is not None:
            if given[-1]:
                raise NotImplementedError("expert parallelism on CPUs with apply_router_weight_on_input")
            weights, ids = given[_WEIGHTS], given[_IDS]
            local = expert_map[ids.long()]
            given[_WEIGHTS] = weights.masked_fill(local < 0, 0.0).contiguous()
            given[_IDS] = local.clamp(min=0).to(ids.dtype).contiguous()
        shipped(self, *given)

    return apply
