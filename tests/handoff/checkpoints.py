"""Tiny checkpoints with random weights, which load in a second."""

import json

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 128, 2, 2, 64, 256, 512


def _layer(prefix, bias, generator):
    def weight(*shape):
        # with smaller weights, attention would not matter, and all prompts would have the same answer
        return torch.randn(*shape, generator=generator) * 0.15

    projections = {"q_proj": HEADS * HEAD_DIM, "k_proj": HEADS * HEAD_DIM, "v_proj": HEADS * HEAD_DIM}
    tensors = {
        f"{prefix}.self_attn.{name}.weight": weight(size, HIDDEN) for name, size in projections.items()
    }
    if bias:
        tensors |= {f"{prefix}.self_attn.{name}.bias": weight(size) for name, size in projections.items()}
    return tensors | {
        f"{prefix}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


_SHAPE = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def qwen2(folder, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for i in range(LAYERS):
        tensors |= _layer(f"model.layers.{i}", bias=True, generator=generator)
        tensors[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(HIDDEN)
    config = _SHAPE | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": LAYERS,
    }
    return _write(folder, config, tensors)


def eagle(folder, seed=1):
    """An EAGLE drafter for `qwen2`: one Llama layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = _layer("layers.0", bias=False, generator=generator) | {
        "fc.weight": torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.1,
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
    }
    config = _SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return _write(folder, config, tensors)


def _write(folder, config, tensors):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
