"""LoRA adapters with random weights, in PEFT's layout, for Qwen2, Llama and similar models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def adapter(folder: Path, model: Path, *, seed: int = 0, rank: int = 2) -> Path:
    """Create `folder` with an adapter that changes the answers of `model`."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, between = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    sizes = {  # module -> inputs, outputs
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, between),
        "mlp.up_proj": (hidden, between),
        "mlp.down_proj": (between, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config.get("dtype") or "float32")
    tensors: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            up = torch.randn(outputs, rank, generator=generator) * 0.3
            tensors[f"{module}.lora_A.weight"] = down.to(dtype)
            tensors[f"{module}.lora_B.weight"] = up.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.partition(".")[2] for name in sizes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
