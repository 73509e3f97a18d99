"""Sliding windows beside full attention: Gemma 3, and gpt-oss with an EAGLE-3 head.

A window is shorter than the prompts, so that parts of every prompt leave it before the answer begins.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness.architectures import language
from harness.architectures.weights import Weights, common

HIDDEN, HEADS, HEAD_DIM, INNER, EXPERTS, CHOSEN = language.HIDDEN, 2, 64, 256, 4, 2
WINDOW = 16
KINDS = ["sliding_attention", "full_attention"]
_SHAPE = {
    "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "sliding_window": WINDOW,
}


def gemma3(folder: Path, *, layers: int = 4, gain: float = 0.5) -> None:
    """Write a target whose norms' weights are offsets from one, those behind attention and MLP included."""
    weights = Weights(30)
    weights.put("model.embed_tokens.weight", language.embedding() / HIDDEN**0.5)
    for number in range(layers):
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        weights.attention(attention, heads=HEADS, key_heads=1, head_dim=HEAD_DIM, gain=1.0)
        weights.norm(f"{attention}.q_norm", HEAD_DIM, 0.5)
        weights.norm(f"{attention}.k_norm", HEAD_DIM, 0.5)
        weights.mlp(f"{prefix}.mlp", INNER, 1.0)
        weights.norms(prefix, "input_layernorm", "pre_feedforward_layernorm", value=0.0)
        weights.norms(prefix, "post_attention_layernorm", "post_feedforward_layernorm", value=gain - 1.0)
    weights.norm("model.norm", value=0.0)
    weights.put("lm_head.weight", language.head())
    config = common(
        **_SHAPE,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        num_hidden_layers=layers,
        num_key_value_heads=1,
        layer_types=(KINDS * layers)[:layers],
        query_pre_attn_scalar=HEAD_DIM,
    )
    weights.save(
        folder, config | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    )


def gpt_oss(folder: Path, *, layers: int = 6, gain: float = 0.9) -> None:
    """Write a target of bfloat16's experts with sinks, deep enough for the three layers of EAGLE-3."""
    weights = Weights(31)
    weights.put("model.embed_tokens.weight", language.embedding())
    for number in range(layers):
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        weights.attention(
            attention, heads=HEADS, key_heads=HEADS, head_dim=HEAD_DIM, gain=2 * gain, bias=True
        )
        weights.bias(f"{attention}.o_proj", HIDDEN)
        weights.put(f"{attention}.sinks", torch.linspace(-1.0, 1.0, HEADS))
        weights.add(f"{prefix}.mlp.router", EXPERTS, HIDDEN, gain=2.0)
        weights.bias(f"{prefix}.mlp.router", EXPERTS)
        _experts(weights, f"{prefix}.mlp.experts", gain)
        weights.norms(prefix, "input_layernorm", "post_attention_layernorm")
    weights.norm("model.norm")
    weights.put("lm_head.weight", language.head())
    config = common(
        **_SHAPE,
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        num_hidden_layers=layers,
        num_key_value_heads=HEADS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        layer_types=(KINDS * layers)[:layers],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
        },
    )
    weights.save(folder, config)


def _experts(weights: Weights, prefix: str, gain: float) -> None:
    """Add all experts as the checkpoint has them: one tensor each way, inputs first, gate and up in turns."""
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
