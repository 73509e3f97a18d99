"""Mixtures of experts: GLM-4-MoE, ERNIE-4.5-MoE and DeepSeek-V3, each with its MTP layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from harness.architectures import language
from harness.architectures.weights import HIDDEN, Weights, common, mixer, trunk

HEADS, HEAD_DIM, INNER = 2, 64, 256
EXPERTS, CHOSEN, EXPERT_INNER = 4, 2, 64
LAYERS = 3  # the first is dense
KV_RANK, ROPE_DIM, QUERY_RANK = 512, 64, 64  # CPU attention over latents supports 512 + 64
TARGET, DRAFTER = 1.2, 0.6  # size of a layer's output

Layer = Callable[[Weights, str, float, bool], None]  # the last argument: dense
_GROUPS = {
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


def _feed_forward(
    weights: Weights, prefix: str, gain: float, dense: bool, bias: str = "gate", *shape: int
) -> None:
    if dense:
        weights.mlp(f"{prefix}.mlp", INNER, gain)
    else:
        weights.experts(f"{prefix}.mlp", EXPERTS, EXPERT_INNER, gain, "shared_experts")
        weights.put(f"{prefix}.mlp.{bias}.e_score_correction_bias", torch.zeros(*shape, EXPERTS))
    weights.block_norms(prefix)


def _attention(weights: Weights, prefix: str, gain: float) -> None:
    weights.attention(f"{prefix}.self_attn", heads=HEADS, key_heads=1, head_dim=HEAD_DIM, gain=2 * gain)


def _glm_layer(weights: Weights, prefix: str, gain: float, dense: bool) -> None:
    _attention(weights, prefix, gain)
    _feed_forward(weights, prefix, gain, dense)


def _ernie_layer(weights: Weights, prefix: str, gain: float, dense: bool) -> None:
    _attention(weights, prefix, gain)
    _feed_forward(weights, prefix, gain, dense, "moe_statics", 1)


def _deepseek_layer(
    weights: Weights, prefix: str, gain: float, dense: bool, *, head_dim: int = HEAD_DIM, rank: int = KV_RANK
) -> None:
    attention = f"{prefix}.self_attn"
    weights.add(f"{attention}.q_a_proj", QUERY_RANK, HIDDEN)
    weights.norm(f"{attention}.q_a_layernorm", QUERY_RANK)
    weights.add(f"{attention}.q_b_proj", HEADS * (head_dim + ROPE_DIM), QUERY_RANK, gain=1.5)
    weights.add(f"{attention}.kv_a_proj_with_mqa", rank + ROPE_DIM, HIDDEN, gain=1.5)
    weights.norm(f"{attention}.kv_a_layernorm", rank)
    weights.add(f"{attention}.kv_b_proj", HEADS * 2 * head_dim, rank)
    weights.add(f"{attention}.o_proj", HIDDEN, HEADS * head_dim, gain=2 * gain)
    _feed_forward(weights, prefix, gain, dense)


def _target(seed: int, layer: Layer) -> Weights:
    return trunk(seed, LAYERS, lambda weights, prefix, number: layer(weights, prefix, TARGET, number == 0))


def _with_mtp(seed: int, layer: Layer) -> Weights:
    """Return a target whose last layer is an MTP layer with embedding and head, as in GLM and DeepSeek."""
    weights, prefix = _target(seed, layer), f"model.layers.{LAYERS}"
    layer(weights, prefix, DRAFTER, False)
    weights.norms(prefix, "enorm", "hnorm", "shared_head.norm")
    weights.put(f"{prefix}.eh_proj.weight", mixer(1.0, 0.2))
    weights.put(f"{prefix}.embed_tokens.weight", language.embedding())
    weights.put(f"{prefix}.shared_head.head.weight", language.head())
    return weights


def glm4_moe(folder: Path) -> None:
    own = {"num_key_value_heads": 1, "head_dim": HEAD_DIM, "partial_rotary_factor": 0.5, "use_qk_norm": False}
    config = common("Glm4MoeForCausalLM", "glm4_moe", LAYERS, **_GROUPS, **own)
    _with_mtp(10, _glm_layer).save(folder, config)


def deepseek_v3(folder: Path, *, head_dim: int = HEAD_DIM, rank: int = KV_RANK) -> None:
    """Write a model with attention over latents (MLA) of size `rank` and plain rotary embeddings."""
    own = {
        "num_key_value_heads": HEADS,
        "q_lora_rank": QUERY_RANK,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": ROPE_DIM,
        "qk_nope_head_dim": head_dim,
        "v_head_dim": head_dim,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",  # vLLM defaults to softmax, transformers does not
        "topk_method": "noaux_tc",
    }
    config = common("DeepseekV3ForCausalLM", "deepseek_v3", LAYERS, **_GROUPS, **own)
    _with_mtp(11, partial(_deepseek_layer, head_dim=head_dim, rank=rank)).save(folder, config)


def ernie4_5_moe(folder: Path) -> None:
    weights = _target(12, _ernie_layer)
    _ernie_layer(weights, "model.mtp_block.0", DRAFTER, dense=True)
    weights.norms("model", "mtp_emb_norm.0", "mtp_hidden_norm.0")
    weights.put("model.mtp_linear_proj.0.weight", mixer(1.0, 0.2))
    own = {
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "use_bias": False,
        "moe_num_experts": EXPERTS,
        "moe_k": CHOSEN,
        "moe_intermediate_size": EXPERT_INNER,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": LAYERS - 1,
        "moe_layer_interval": 1,
        "num_nextn_predict_layers": 1,
    }
    weights.save(folder, common("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", LAYERS, **own))
