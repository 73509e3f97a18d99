"""The folders of the drafters: one trunk, and two views of it.

`weights/` is the trunk as Qwen2. `weights-mtp/` is the same trunk as MiMo, a Qwen2 with an MTP layer: its index
names the trunk's file by a link and adds the layer's own. `eagle3/` is a draft model beside either of them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from heads import EAGLE3_LAYERS
from safetensors import safe_open
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
WEIGHTS, MTP, EAGLE3 = HERE / "weights", HERE / "weights-mtp", HERE / "eagle3"
# Files that the MTP view links from the trunk's folder, by relative links.
LINKED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TRUNK_FILE, MTP_FILE = "model-trunk.safetensors", "model-mtp.safetensors"


def write_head(kind: str, tensors: dict[str, torch.Tensor], target: Path) -> None:
    """Write a head's weights in bfloat16 and its configuration to `target`, replacing older files."""
    target.mkdir(parents=True, exist_ok=True)
    narrow = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    config: dict[str, Any] = json.loads((WEIGHTS / "config.json").read_text())
    if kind == "mtp":
        _save(narrow, target / MTP_FILE)
        _link_trunk(target)
        _write_index(target)
        config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    else:
        _save(narrow, target / "model.safetensors")
        config = _eagle3_config(config)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes it readable by its owner alone
    os.replace(partial, path)


def _link_trunk(target: Path) -> None:
    names = {name: name for name in LINKED} | {TRUNK_FILE: "model.safetensors"}
    for name, source in names.items():
        link = target / name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(WEIGHTS / source, target))


def _write_index(target: Path) -> None:
    places: dict[str, str] = {}
    total = 0
    for file in (TRUNK_FILE, MTP_FILE):
        with safe_open(target / file, framework="pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), file)
        total += (target / file).stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _eagle3_config(trunk: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration: a Llama layer of the trunk's sizes, with its embedding and output."""
    shared = (
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "hidden_act",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_key_value_heads",
        "pad_token_id",
        "rms_norm_eps",
        "rope_parameters",
        "vocab_size",
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: trunk[name] for name in shared},
        "attention_bias": False,
        "norm_before_residual": True,
        "head_dim": trunk["hidden_size"] // trunk["num_attention_heads"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": trunk["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(EAGLE3_LAYERS),
    }
