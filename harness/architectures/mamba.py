"""A hybrid of Mamba-2 and full attention: Granite 4 without experts."""

from __future__ import annotations

from pathlib import Path

import torch

from harness.architectures import language
from harness.architectures.weights import Weights, common

HIDDEN, HEADS, INNER = language.HIDDEN, 2, 256
EXPAND, STATE_HEADS, STATE_HEAD_DIM, STATE, KERNEL = 2, 4, 64, 64, 4
KINDS = ["linear_attention", "full_attention"]


def granite4(folder: Path, *, layers: int = 4, gain: float = 0.9) -> None:
    weights = Weights(40)
    weights.put("model.embed_tokens.weight", language.embedding())
    for number in range(layers):
        prefix = f"model.layers.{number}"
        if number % 2:
            weights.attention(
                f"{prefix}.self_attn", heads=HEADS, key_heads=1, head_dim=HIDDEN // HEADS, gain=2 * gain
            )
        else:
            _mamba(weights, f"{prefix}.mamba", gain)
        weights.add(f"{prefix}.shared_mlp.input_linear", 2 * INNER, HIDDEN, gain=1.5)
        weights.add(f"{prefix}.shared_mlp.output_linear", HIDDEN, INNER, gain=gain)
        weights.norms(prefix, "input_layernorm", "post_attention_layernorm")
    weights.norm("model.norm")
    weights.put("lm_head.weight", language.head())
    config = common(
        architectures=["GraniteMoeHybridForCausalLM"],
        model_type="granitemoehybrid",
        num_hidden_layers=layers,
        layer_types=(KINDS * layers)[:layers],
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        attention_multiplier=(HIDDEN // HEADS) ** -0.5,
        attention_bias=False,
        intermediate_size=INNER,
        shared_intermediate_size=INNER,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        mamba_expand=EXPAND,
        mamba_n_heads=STATE_HEADS,
        mamba_d_head=STATE_HEAD_DIM,
        mamba_d_state=STATE,
        mamba_d_conv=KERNEL,
        mamba_n_groups=1,
        mamba_chunk_size=64,
    )
    weights.save(folder, config)


def _mamba(weights: Weights, prefix: str, gain: float) -> None:
    inner = EXPAND * HIDDEN
    mixed = inner + 2 * STATE
    weights.add(f"{prefix}.in_proj", inner + mixed + STATE_HEADS, HIDDEN)
    weights.add(f"{prefix}.conv1d", mixed, 1, KERNEL)
    weights.bias(f"{prefix}.conv1d", mixed)
    weights.put(f"{prefix}.dt_bias", torch.full((STATE_HEADS,), 0.5))
    weights.put(f"{prefix}.A_log", torch.linspace(0.0, 1.0, STATE_HEADS))
    weights.put(f"{prefix}.D", torch.ones(STATE_HEADS))
    weights.norm(f"{prefix}.norm", inner)
    weights.add(f"{prefix}.out_proj", HIDDEN, inner, gain=2 * gain)
