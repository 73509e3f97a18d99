"""Mixtures of experts: GLM-4-MoE, ERNIE-4.5-MoE and DeepSeek-V3, each with its MTP layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from harness.architectures import language
from harness.architectures.weights import Weights, common, mixer

HIDDEN, HEADS, HEAD_DIM, INNER = language.HIDDEN, 2, 64, 256
EXPERTS, CHOSEN, EXPERT_INNER = 4, 2, 64
LAYERS = 3  # the first dense
KV_RANK, ROPE_DIM, QUERY_RANK = 512, 64, 64  # CPU attention over latents supports 512 + 64
TARGET, DRAFTER = 1.2, 0.6  # what a layer adds


def _experts(weights: Weights, prefix: str, gain: float) -> None:
    weights.add(f"{prefix}.gate", EXPERTS, HIDDEN, gain=2.0)
    for number in range(EXPERTS):
        weights.mlp(f"{prefix}.experts.{number}", EXPERT_INNER, gain)
    weights.mlp(f"{prefix}.shared_experts", EXPERT_INNER, gain)


def _target(seed: int, layer: Callable[[Weights, str, float, bool], None]) -> Weights:
    weights = Weights(seed)
    weights.put("model.embed_tokens.weight", language.embedding())
    for number in range(LAYERS):
        layer(weights, f"model.layers.{number}", TARGET, number == 0)
    weights.norm("model.norm")
    weights.put("lm_head.weight", language.head())
    return weights


def _mtp_layer(weights: Weights, layer: Callable[[Weights, str, float, bool], None]) -> None:
    """Add an MTP layer as GLM and DeepSeek name it: one layer more, with its own embedding and head."""
    prefix = f"model.layers.{LAYERS}"
    layer(weights, prefix, DRAFTER, False)
    weights.norms(prefix, "enorm", "hnorm", "shared_head.norm")
    weights.put(f"{prefix}.eh_proj.weight", mixer(1.0, 0.2))
    weights.put(f"{prefix}.embed_tokens.weight", language.embedding())
    weights.put(f"{prefix}.shared_head.head.weight", language.head())


def _glm_layer(weights: Weights, prefix: str, gain: float, dense: bool) -> None:
    weights.attention(f"{prefix}.self_attn", heads=HEADS, key_heads=1, head_dim=HEAD_DIM, gain=2 * gain)
    if dense:
        weights.mlp(f"{prefix}.mlp", INNER, gain)
    else:
        _experts(weights, f"{prefix}.mlp", gain)
        weights.put(f"{prefix}.mlp.gate.e_score_correction_bias", torch.zeros(EXPERTS))
    weights.norms(prefix, "input_layernorm", "post_attention_layernorm")


_GROUPS = {
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 1,
    "intermediate_size": INNER,
    "moe_intermediate_size": EXPERT_INNER,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": CHOSEN,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": HEADS,
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
}


def glm4_moe(folder: Path) -> None:
    weights = _target(10, _glm_layer)
    _mtp_layer(weights, _glm_layer)
    config = common(
        **_GROUPS,
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        partial_rotary_factor=0.5,
        use_qk_norm=False,
    )
    weights.save(folder, config)


def _deepseek_layer(weights: Weights, prefix: str, gain: float, dense: bool) -> None:
    attention = f"{prefix}.self_attn"
    weights.add(f"{attention}.q_a_proj", QUERY_RANK, HIDDEN)
    weights.norm(f"{attention}.q_a_layernorm", QUERY_RANK)
    weights.add(f"{attention}.q_b_proj", HEADS * (HEAD_DIM + ROPE_DIM), QUERY_RANK, gain=1.5)
    weights.add(f"{attention}.kv_a_proj_with_mqa", KV_RANK + ROPE_DIM, HIDDEN, gain=1.5)
    weights.norm(f"{attention}.kv_a_layernorm", KV_RANK)
    weights.add(f"{attention}.kv_b_proj", HEADS * 2 * HEAD_DIM, KV_RANK)
    weights.add(f"{attention}.o_proj", HIDDEN, HEADS * HEAD_DIM, gain=2 * gain)
    if dense:
        weights.mlp(f"{prefix}.mlp", INNER, gain)
    else:
        _experts(weights, f"{prefix}.mlp", gain)
        weights.put(f"{prefix}.mlp.gate.e_score_correction_bias", torch.zeros(EXPERTS))
    weights.norms(prefix, "input_layernorm", "post_attention_layernorm")


def deepseek_v3(folder: Path) -> None:
    """Write a model with attention over latents (MLA) and plain rotary embeddings."""
    weights = _target(11, _deepseek_layer)
    _mtp_layer(weights, _deepseek_layer)
    config = common(
        **_GROUPS,
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        num_key_value_heads=HEADS,
        q_lora_rank=QUERY_RANK,
        kv_lora_rank=KV_RANK,
        qk_rope_head_dim=ROPE_DIM,
        qk_nope_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        moe_layer_freq=1,
        scoring_func="sigmoid",  # vLLM defaults to softmax, transformers does not
        topk_method="noaux_tc",
    )
    weights.save(folder, config)


def _ernie_layer(weights: Weights, prefix: str, gain: float, dense: bool) -> None:
    weights.attention(f"{prefix}.self_attn", heads=HEADS, key_heads=1, head_dim=HEAD_DIM, gain=2 * gain)
    if dense:
        weights.mlp(f"{prefix}.mlp", INNER, gain)
    else:
        _experts(weights, f"{prefix}.mlp", gain)
        weights.put(f"{prefix}.mlp.moe_statics.e_score_correction_bias", torch.zeros(1, EXPERTS))
    weights.norms(prefix, "input_layernorm", "post_attention_layernorm")


def ernie4_5_moe(folder: Path) -> None:
    weights = _target(12, _ernie_layer)
    _ernie_layer(weights, "model.mtp_block.0", DRAFTER, dense=True)
    weights.norms("model", "mtp_emb_norm.0", "mtp_hidden_norm.0")
    weights.put("model.mtp_linear_proj.0.weight", mixer(1.0, 0.2))
    config = common(
        architectures=["Ernie4_5_MoeForCausalLM"],
        model_type="ernie4_5_moe",
        num_hidden_layers=LAYERS,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        use_bias=False,
        moe_num_experts=EXPERTS,
        moe_k=CHOSEN,
        moe_intermediate_size=EXPERT_INNER,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=LAYERS - 1,
        moe_layer_interval=1,
        num_nextn_predict_layers=1,
    )
    weights.save(folder, config)
