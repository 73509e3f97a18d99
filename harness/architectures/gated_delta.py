"""Hybrids of linear and full attention: Qwen3.5 and Qwen3-Next, with their MTP layers.

On CPUs the gated delta rule supports only bfloat16 and heads of 128. The norms' weights are offsets from one.
"""

from __future__ import annotations

from pathlib import Path

import torch

from harness.architectures import language
from harness.architectures.weights import Weights, common, mixer

HIDDEN, HEADS, HEAD_DIM, INNER = language.HIDDEN, 2, 128, 256
KEY_HEADS, VALUE_HEADS, KERNEL = 1, 2, 4
KEYS, VALUES = KEY_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM
EXPERTS, CHOSEN, EXPERT_INNER = 4, 2, 64
KINDS = ["linear_attention", "full_attention"] * 2
TARGET, DRAFTER = (
    0.75,
    2.5,
)  # what a layer adds; little in the target, as bfloat16 decides near-ties by chance

# Texts whose answers of both models have no near-ties: over 64 tokens the best token leads the second by
# more than 0.3 in log-probability. Answers were seen to flip below 0.16.
CLEAR = (11, 12, 14, 15, 17, 20, 22, 24, 25, 28, 34, 36, 40, 42, 44, 46, 48, 49, 52, 54)


def _linear_attention(weights: Weights, prefix: str, gain: float, *, fused: bool) -> None:
    weights.put(f"{prefix}.dt_bias", torch.full((VALUE_HEADS,), 0.5))
    weights.put(f"{prefix}.A_log", torch.linspace(0.0, 1.0, VALUE_HEADS))
    weights.add(f"{prefix}.conv1d", 2 * KEYS + VALUES, 1, KERNEL)
    weights.norm(f"{prefix}.norm", HEAD_DIM)
    if fused:  # as Qwen3-Next names and orders them
        weights.add(f"{prefix}.in_proj_qkvz", 2 * KEYS + 2 * VALUES, HIDDEN)
        weights.add(f"{prefix}.in_proj_ba", 2 * VALUE_HEADS, HIDDEN)
    else:
        weights.add(f"{prefix}.in_proj_qkv", 2 * KEYS + VALUES, HIDDEN)
        weights.add(f"{prefix}.in_proj_z", VALUES, HIDDEN)
        weights.add(f"{prefix}.in_proj_b", VALUE_HEADS, HIDDEN)
        weights.add(f"{prefix}.in_proj_a", VALUE_HEADS, HIDDEN)
    weights.add(f"{prefix}.out_proj", HIDDEN, VALUES, gain=2 * gain)


def _experts(weights: Weights, prefix: str, gain: float) -> None:
    weights.add(f"{prefix}.gate", EXPERTS, HIDDEN, gain=2.0)
    for number in range(EXPERTS):
        weights.mlp(f"{prefix}.experts.{number}", EXPERT_INNER, gain)
    weights.mlp(f"{prefix}.shared_expert", EXPERT_INNER, gain)
    weights.add(f"{prefix}.shared_expert_gate", 1, HIDDEN)


def _layer(weights: Weights, prefix: str, kind: str, gain: float, *, experts: bool) -> None:
    if kind == "linear_attention":
        _linear_attention(weights, f"{prefix}.linear_attn", gain, fused=experts)
    else:
        attention = f"{prefix}.self_attn"  # with a gate beside its query
        weights.attention(
            attention, heads=HEADS, key_heads=1, head_dim=HEAD_DIM, gain=4 * gain, query_parts=2
        )
        weights.norm(f"{attention}.q_norm", HEAD_DIM, 0.0)
        weights.norm(f"{attention}.k_norm", HEAD_DIM, 0.0)
    if experts:
        _experts(weights, f"{prefix}.mlp", gain)
    else:
        weights.mlp(f"{prefix}.mlp", INNER, gain)
    weights.norms(prefix, "input_layernorm", "post_attention_layernorm", value=0.0)


def _whole(seed: int, *, experts: bool) -> Weights:
    weights = Weights(seed)
    weights.put("model.embed_tokens.weight", language.embedding())
    for number, kind in enumerate(KINDS):
        _layer(weights, f"model.layers.{number}", kind, TARGET, experts=experts)
    weights.norm("model.norm", value=0.0)
    weights.put("lm_head.weight", language.head())
    _layer(weights, "mtp.layers.0", "full_attention", DRAFTER, experts=experts)
    weights.norms("mtp", "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding", value=0.0)
    weights.put("mtp.fc.weight", mixer(1.0, 0.2))
    return weights


_SHAPE = {
    "num_hidden_layers": len(KINDS),
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
    config = common(
        **_SHAPE, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", mtp_num_hidden_layers=1
    )
    _whole(20, experts=False).save(folder, config, "bfloat16")


def qwen3_next(folder: Path) -> None:
    config = common(
        **_SHAPE,
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        num_nextn_predict_layers=1,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=EXPERT_INNER,
        shared_expert_intermediate_size=EXPERT_INNER,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )
    _whole(21, experts=True).save(folder, config, "bfloat16")
