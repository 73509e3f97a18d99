"""Dense targets (Qwen2, Qwen3, MiMo) and drafters with their own folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harness.architectures import language
from harness.architectures.weights import HIDDEN, Weights, common, mixer, trunk

HEADS, HEAD_DIM, INNER = 2, 64, 256
DRAFTER = 0.6  # size of a drafter layer's output


def _layer(weights: Weights, prefix: str, gain: float, *, bias: bool = False, qk_norm: bool = False) -> None:
    attention = f"{prefix}.self_attn"
    weights.attention(attention, heads=HEADS, key_heads=1, head_dim=HEAD_DIM, gain=2 * gain, bias=bias)
    if qk_norm:
        weights.norm(f"{attention}.q_norm", HEAD_DIM)
        weights.norm(f"{attention}.k_norm", HEAD_DIM)
    weights.mlp(f"{prefix}.mlp", INNER, gain)
    weights.block_norms(prefix)


def _trunk(seed: int, layers: int, gain: float, **kind: bool) -> Weights:
    return trunk(seed, layers, lambda weights, prefix, _: _layer(weights, prefix, gain, **kind))


def _config(architecture: str, model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    shape = {"intermediate_size": INNER, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    return common(architecture, model_type, layers, num_key_value_heads=1, **shape) | more


def qwen2(folder: Path, *, layers: int = 6, gain: float = 0.9) -> None:
    """Write a target that is deep enough for EAGLE-3, which reads three layers."""
    _trunk(0, layers, gain, bias=True).save(folder, _config("Qwen2ForCausalLM", "qwen2", layers))


def qwen3(folder: Path) -> None:
    layers, gain = 4, 1.1
    config = _config("Qwen3ForCausalLM", "qwen3", layers, attention_bias=False)
    _trunk(1, layers, gain, qk_norm=True).save(folder, config)


def mimo(folder: Path, *, layers: int = 4, gain: float = 1.1) -> None:
    """Write a Qwen2 trunk and one MTP layer, whose input projection takes the target's state first."""
    weights = _trunk(2, layers, gain, bias=True)
    prefix = "model.mtp_layers.0"
    _layer(weights, prefix, DRAFTER, bias=True)
    weights.norms(prefix, "token_layernorm", "hidden_layernorm", "final_layernorm")
    weights.put(f"{prefix}.input_proj.weight", mixer(1.0, 0.2, embedded_first=False))
    weights.save(folder, _config("MiMoForCausalLM", "qwen2", layers, num_nextn_predict_layers=1))


def small_qwen2(folder: Path) -> None:
    """Write a draft model: a target with one small layer."""
    _trunk(3, 1, DRAFTER, bias=True).save(folder, _config("Qwen2ForCausalLM", "qwen2", 1))


def eagle(folder: Path) -> None:
    """Write one Llama layer over [embedding, state], with the target's head."""
    weights = Weights(4)
    _layer(weights, "layers.0", DRAFTER)
    del weights.tensors["layers.0.input_layernorm.weight"]
    weights.put("embed_tokens.weight", language.embedding())
    weights.put("fc.weight", mixer(1.0, 0.05))
    weights.save(folder, _config("LlamaForCausalLM", "llama", 1))


def eagle3(folder: Path) -> None:
    """Write one Llama layer over [embedding, state], where the state combines three layers' states.

    Its attention passes the last token on: each token attends to equal tokens and copies them.
    """
    weights = Weights(5)
    _layer(weights, "midlayer", 0.3)
    unit, nothing = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    attention = "midlayer.self_attn"
    for name, scale in (("q_proj", 1.5), ("k_proj", 1.5), ("v_proj", 1.0)):
        weights.put(f"{attention}.{name}.weight", torch.cat([scale * unit, nothing], 1))
    weights.put(f"{attention}.o_proj.weight", unit)
    weights.norm("midlayer.hidden_norm")
    weights.norm("norm")
    weights.add("fc", HIDDEN, 3 * HIDDEN, gain=0.1)
    weights.put("embed_tokens.weight", language.embedding())
    weights.put("lm_head.weight", language.head())
    config = _config("LlamaForCausalLMEagle3", "llama", 1, draft_vocab_size=language.VOCABULARY)
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "num_key_value_heads": HEADS}
    weights.save(folder, config)


def medusa(folder: Path) -> None:
    """Write heads on the target's last state: the n-th predicts the token n positions after the next."""
    weights = Weights(6)
    for number in range(2):
        weights.add(f"blocks.{number}.layers.0", HIDDEN, HIDDEN, gain=0.2)
        weights.put(f"lm_heads.{number}.weight", language.head(steps=number + 2))
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": language.VOCABULARY,
        "num_heads": 2,
        "num_hidden_layers": 1,
    }
    weights.save(folder, config)
