"""Sliding windows mixed with full attention: Gemma 3, and gpt-oss with an EAGLE-3 head.

The windows are shorter than the prompts, so each prompt has tokens outside its window when the answer begins.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness.architectures.weights import HIDDEN, Weights, common, trunk

HEADS, HEAD_DIM, INNER, EXPERTS, CHOSEN = 2, 64, 256, 4, 2
WINDOW = 16
KINDS = ["sliding_attention", "full_attention"]
_SHAPE = {
    "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "sliding_window": WINDOW,
}


def gemma3(folder: Path) -> None:
    """Write a target that stores norm weights minus one and has extra norms after attention and MLP."""
    layers, gain = 4, 0.5

    def layer(weights: Weights, prefix: str, _: int) -> None:
        attention = f"{prefix}.self_attn"
        weights.attention(attention, heads=HEADS, key_heads=1, head_dim=HEAD_DIM, gain=1.0)
        weights.norm(f"{attention}.q_norm", HEAD_DIM, 0.5)
        weights.norm(f"{attention}.k_norm", HEAD_DIM, 0.5)
        weights.mlp(f"{prefix}.mlp", INNER, 1.0)
        weights.norms(prefix, "input_layernorm", "pre_feedforward_layernorm", value=0.0)
        weights.norms(prefix, "post_attention_layernorm", "post_feedforward_layernorm", value=gain - 1.0)

    own = {
        "num_key_value_heads": 1,
        "layer_types": (KINDS * layers)[:layers],
        "query_pre_attn_scalar": HEAD_DIM,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }
    config = common("Gemma3ForCausalLM", "gemma3_text", layers, **_SHAPE) | own
    trunk(30, layers, layer, norm=0.0, narrow=HIDDEN**0.5).save(folder, config)


def gpt_oss(folder: Path) -> None:
    """Write a target with experts and attention sinks, deep enough for EAGLE-3, which reads three layers."""
    layers, gain = 6, 0.9

    def layer(weights: Weights, prefix: str, _: int) -> None:
        attention = f"{prefix}.self_attn"
        size = {"heads": HEADS, "key_heads": HEADS, "head_dim": HEAD_DIM}
        weights.attention(attention, gain=2 * gain, bias=True, **size)
        weights.bias(f"{attention}.o_proj", HIDDEN)
        weights.put(f"{attention}.sinks", torch.linspace(-1.0, 1.0, HEADS))
        weights.add(f"{prefix}.mlp.router", EXPERTS, HIDDEN, gain=2.0)
        weights.bias(f"{prefix}.mlp.router", EXPERTS)
        _experts(weights, f"{prefix}.mlp.experts", gain)
        weights.block_norms(prefix)

    own = {
        "num_key_value_heads": HEADS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "layer_types": (KINDS * layers)[:layers],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
        },
    }
    trunk(31, layers, layer).save(folder, common("GptOssForCausalLM", "gpt_oss", layers, **_SHAPE, **own))


def _experts(weights: Weights, prefix: str, gain: float) -> None:
    """Add all experts, one tensor per projection: inputs first, gate and up interleaved."""
    for name, (inside, outside), scale in (
        ("gate_up_proj", (HIDDEN, 2 * INNER), 1.5),
        ("down_proj", (INNER, HIDDEN), gain),
    ):
        stacked = []
        for number in range(EXPERTS):
            weights.add(f"{prefix}.{number}", outside, inside, gain=scale)
            stacked.append(weights.tensors.pop(f"{prefix}.{number}.weight").T)
        weights.put(f"{prefix}.{name}", torch.stack(stacked))
        weights.put(f"{prefix}.{name}_bias", torch.zeros(EXPERTS, outside))
