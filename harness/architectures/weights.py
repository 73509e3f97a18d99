"""Checkpoint tensors, with Hugging Face's names, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness.architectures import language
from harness.checkpoints import byte_tokenizer

HIDDEN = language.HIDDEN


class Weights:
    """Named tensors; `add` draws random ones from a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """Add `name`.weight, a projection whose output is about `gain` times as large as its input."""
        spread = gain / shape[-1] ** 0.5
        self.tensors[f"{name}.weight"] = torch.randn(*shape, generator=self._generator) * spread

    def bias(self, name: str, size: int) -> None:
        self.tensors[f"{name}.bias"] = torch.randn(size, generator=self._generator) * 0.1

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor

    def norm(self, name: str, size: int = HIDDEN, value: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = torch.full((size,), value)

    def norms(self, prefix: str, *names: str, value: float = 1.0) -> None:
        for name in names:
            self.norm(f"{prefix}.{name}", value=value)

    def block_norms(self, prefix: str, value: float = 1.0) -> None:
        self.norms(prefix, "input_layernorm", "post_attention_layernorm", value=value)

    def mlp(self, prefix: str, inner: int, gain: float) -> None:
        """Add a gated MLP whose output has entries of about `gain`."""
        self.add(f"{prefix}.gate_proj", inner, HIDDEN, gain=2.0)
        self.add(f"{prefix}.up_proj", inner, HIDDEN)
        self.add(f"{prefix}.down_proj", HIDDEN, inner, gain=gain)

    def experts(self, prefix: str, count: int, inner: int, gain: float, shared: str) -> None:
        """Add a router, experts, and a shared expert named `shared`."""
        self.add(f"{prefix}.gate", count, HIDDEN, gain=2.0)
        for number in range(count):
            self.mlp(f"{prefix}.experts.{number}", inner, gain)
        self.mlp(f"{prefix}.{shared}", inner, gain)

    def attention(
        self,
        prefix: str,
        *,
        heads: int,
        key_heads: int,
        head_dim: int,
        gain: float,
        bias: bool = False,
        query_parts: int = 1,
    ) -> None:
        """Add attention that is sharp enough to select tokens; its output has entries of about `gain`."""
        for name, size in (("q_proj", query_parts * heads), ("k_proj", key_heads), ("v_proj", key_heads)):
            self.add(f"{prefix}.{name}", size * head_dim, HIDDEN, gain=1.0 if name == "v_proj" else 1.5)
            if bias:
                self.bias(f"{prefix}.{name}", size * head_dim)
        self.add(f"{prefix}.o_proj", HIDDEN, heads * head_dim, gain=gain)

    def save(self, folder: Path, config: dict[str, Any], dtype: str = "float32") -> None:
        """Write config.json, model.safetensors and the byte-level tokenizer into the new folder `folder`."""
        folder.mkdir(parents=True)
        kind = getattr(torch, dtype)
        tensors = {
            name: (tensor.to(kind) if tensor.is_floating_point() else tensor).contiguous().clone()
            for name, tensor in self.tensors.items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=1))
        byte_tokenizer(folder, language.VOCABULARY)


def trunk(
    seed: int, layers: int, layer: Callable[[Weights, str, int], None], norm: float = 1.0, narrow: float = 1.0
) -> Weights:
    """Return a target's weights. `layer` adds a layer, given its prefix and number."""
    weights = Weights(seed)
    weights.put("model.embed_tokens.weight", language.embedding() / narrow)
    for number in range(layers):
        layer(weights, f"model.layers.{number}", number)
    weights.norm("model.norm", value=norm)
    weights.put("lm_head.weight", language.head())
    return weights


def mixer(embedded: float, hidden: float, embedded_first: bool = True) -> torch.Tensor:
    """Return a drafter's input projection [HIDDEN, 2 * HIDDEN], which adds embedding and target state."""
    parts = [embedded * torch.eye(HIDDEN), hidden * torch.eye(HIDDEN)]
    return torch.cat(parts if embedded_first else parts[::-1], dim=1)


def common(architecture: str, model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "vocab_size": language.VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": 256,
    } | more
