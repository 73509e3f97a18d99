"""Hybrids of full attention with a gated delta rule (Qwen3.5, Qwen3-Next) or with Mamba-2 (Granite 4).

On CPUs the gated delta rule supports only bfloat16 and heads of 128. These models store norm weights minus
one.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from harness.architectures.weights import HIDDEN, Weights, common, mixer, trunk

HEADS, HEAD_DIM, INNER = 2, 128, 256
KEY_HEADS, VALUE_HEADS, KERNEL = 1, 2, 4
KEYS, VALUES = KEY_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM
EXPERTS, CHOSEN, EXPERT_INNER = 4, 2, 64
KINDS = ["linear_attention", "full_attention"] * 2
# Size of a layer's output; small in the target, because rounding to bfloat16 decides near-ties.
TARGET, DRAFTER = 0.75, 2.5
# Granite 4
EXPAND, STATE_HEADS, STATE_HEAD_DIM, STATE = 2, 4, 64, 64

# Texts that both Qwen models answer without near-ties: for 64 tokens the log-probability gap to the second
# token is above 0.3. Answers flipped where it was below 0.16.
CLEAR = (11, 12, 14, 15, 17, 20, 22, 24, 25, 28, 34, 36, 40, 42, 44, 46, 48, 49, 52, 54)


def _delta_rule(weights: Weights, prefix: str, gain: float, *, fused: bool) -> None:
    weights.put(f"{prefix}.dt_bias", torch.full((VALUE_HEADS,), 0.5))
    weights.put(f"{prefix}.A_log", torch.linspace(0.0, 1.0, VALUE_HEADS))
    weights.add(f"{prefix}.conv1d", 2 * KEYS + VALUES, 1, KERNEL)
    weights.norm(f"{prefix}.norm", HEAD_DIM)
    if fused:  # Qwen3-Next's names and order
        inputs = {"qkvz": 2 * KEYS + 2 * VALUES, "ba": 2 * VALUE_HEADS}
    else:
        inputs = {"qkv": 2 * KEYS + VALUES, "z": VALUES, "b": VALUE_HEADS, "a": VALUE_HEADS}
    for name, size in inputs.items():
        weights.add(f"{prefix}.in_proj_{name}", size, HIDDEN)
    weights.add(f"{prefix}.out_proj", HIDDEN, VALUES, gain=2 * gain)


def _layer(weights: Weights, prefix: str, kind: str, gain: float, *, experts: bool) -> None:
    if kind == "linear_attention":
        _delta_rule(weights, f"{prefix}.linear_attn", gain, fused=experts)
    else:
        attention = f"{prefix}.self_attn"  # the query projection includes a gate
        weights.attention(
            attention, heads=HEADS, key_heads=1, head_dim=HEAD_DIM, gain=4 * gain, query_parts=2
        )
        weights.norm(f"{attention}.q_norm", HEAD_DIM, 0.0)
        weights.norm(f"{attention}.k_norm", HEAD_DIM, 0.0)
    if experts:
        weights.experts(f"{prefix}.mlp", EXPERTS, EXPERT_INNER, gain, "shared_expert")
        weights.add(f"{prefix}.mlp.shared_expert_gate", 1, HIDDEN)
    else:
        weights.mlp(f"{prefix}.mlp", INNER, gain)
    weights.block_norms(prefix, 0.0)


def _qwen(seed: int, *, experts: bool) -> Weights:
    layer = partial(_layer, experts=experts)
    weights = trunk(
        seed, len(KINDS), lambda to, prefix, number: layer(to, prefix, KINDS[number], TARGET), norm=0.0
    )
    layer(weights, "mtp.layers.0", "full_attention", DRAFTER)
    weights.norms("mtp", "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding", value=0.0)
    weights.put("mtp.fc.weight", mixer(1.0, 0.2))
    return weights


_SHAPE = {
    "layer_types": KINDS,
    "full_attention_interval": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "intermediate_size": INNER,
    "linear_conv_kernel_dim": KERNEL,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
}


def qwen3_5(folder: Path) -> None:
    config = common("Qwen3_5ForCausalLM", "qwen3_5_text", len(KINDS), **_SHAPE, mtp_num_hidden_layers=1)
    _qwen(20, experts=False).save(folder, config, "bfloat16")


def qwen3_next(folder: Path) -> None:
    own = {
        "num_nextn_predict_layers": 1,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": EXPERT_INNER,
        "shared_expert_intermediate_size": EXPERT_INNER,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    config = common("Qwen3NextForCausalLM", "qwen3_next", len(KINDS), **_SHAPE, **own)
    _qwen(21, experts=True).save(folder, config, "bfloat16")


def granite4(folder: Path) -> None:
    """Write a hybrid with Mamba-2, without experts."""
    layers, gain = 4, 0.9

    def layer(weights: Weights, prefix: str, number: int) -> None:
        if number % 2:
            attention, head_dim = f"{prefix}.self_attn", HIDDEN // HEADS
            weights.attention(attention, heads=HEADS, key_heads=1, head_dim=head_dim, gain=2 * gain)
        else:
            _mamba(weights, f"{prefix}.mamba", gain)
        weights.add(f"{prefix}.shared_mlp.input_linear", 2 * INNER, HIDDEN, gain=1.5)
        weights.add(f"{prefix}.shared_mlp.output_linear", HIDDEN, INNER, gain=gain)
        weights.block_norms(prefix)

    own = {
        "layer_types": (KINDS * layers)[:layers],
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "attention_multiplier": (HIDDEN // HEADS) ** -0.5,
        "attention_bias": False,
        "intermediate_size": INNER,
        "shared_intermediate_size": INNER,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "mamba_expand": EXPAND,
        "mamba_n_heads": STATE_HEADS,
        "mamba_d_head": STATE_HEAD_DIM,
        "mamba_d_state": STATE,
        "mamba_d_conv": KERNEL,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 64,
    }
    config = common("GraniteMoeHybridForCausalLM", "granitemoehybrid", layers, **own)
    trunk(40, layers, layer).save(folder, config)


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
