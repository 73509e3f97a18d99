"""The demo model, a Qwen2 of 5.8 million parameters, and the folders of the model and its drafters.

`weights/` is the trunk as Qwen2. `weights-mtp/` is the trunk as MiMo, which is Qwen2 with an MTP layer; it
has a link to the trunk's file, and a file with the MTP layer. `eagle3/` is a draft model for either.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from chat import END_OF_TEXT, IM_END
from heads import EAGLE3_LAYERS
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizer import CONTEXT, VOCABULARY, save_tokenizer, token_id
from tokenizers import Tokenizer
from torch.nn import functional
from trainer import Batch
from transformers import Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
WEIGHTS = HERE / "weights"
TARGETS = {"mtp": HERE / "weights-mtp", "eagle3": HERE / "eagle3"}
# Files of the trunk that weights-mtp/ links to.
LINKED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TRUNK_FILE, MTP_FILE = "model-trunk.safetensors", "model-mtp.safetensors"


def new_model(tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """Return a model with new float32 weights. Copying from the context needs depth: eight narrow layers."""
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        use_cache=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, IM_END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
        dtype="bfloat16",
    )
    return Qwen2ForCausalLM(config).float()


class NextToken:
    """The weighted mean cross-entropy of the next token."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        # Plain attention, compiled: 9.6k tokens/s; torch 2.13's fused kernel, not compiled: 6.6k (two cores
        # of an EPYC with AVX-512 BF16, windows of 512). Each window length is compiled.
        model.set_attn_implementation("eager")
        self._forward = torch.compile(model.forward, dynamic=False)

    def __call__(self, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self._forward(input_ids=batch.ids[:, :-1], use_cache=False).logits
        targets, weights = batch.ids[:, 1:].flatten(), batch.weights[:, 1:].flatten()
        losses = functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1.0)


def write_trunk(model: Qwen2ForCausalLM, tokenizer: Tokenizer, target: Path) -> None:
    """Write bfloat16 weights, configuration and tokenizer."""
    save_tokenizer(tokenizer, target)
    tied = "lm_head.weight"  # the embedding has the same values
    tensors = {name: value for name, value in model.state_dict().items() if name != tied}
    _save(tensors, target / "model.safetensors")
    model.config.save_pretrained(target)
    ends = [model.config.eos_token_id, model.config.pad_token_id]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False}
    _write_json(generation, target, "generation_config.json")


def write_drafter(kind: str, tensors: dict[str, torch.Tensor], target: Path) -> None:
    """Write a drafter's weights in bfloat16 and its configuration."""
    target.mkdir(parents=True, exist_ok=True)
    trunk: dict[str, Any] = json.loads((WEIGHTS / "config.json").read_text())
    if kind == "eagle3":
        _save(tensors, target / "model.safetensors")
        _write_json(_eagle3_config(trunk), target, "config.json")
        return
    _save(tensors, target / MTP_FILE)
    for name in (*LINKED, TRUNK_FILE):
        link = target / name
        link.unlink(missing_ok=True)
        source = "model.safetensors" if name == TRUNK_FILE else name
        link.symlink_to(os.path.relpath(WEIGHTS / source, target))
    places: dict[str, str] = {}
    for file in (TRUNK_FILE, MTP_FILE):
        with safe_open(target / file, framework="pt") as found:
            places |= dict.fromkeys(found.keys(), file)
    total = sum((target / file).stat().st_size for file in (TRUNK_FILE, MTP_FILE))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    _write_json(index, target, "model.safetensors.index.json")
    config = trunk | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    _write_json(config, target, "config.json")


def _write_json(content: dict[str, Any], folder: Path, name: str) -> None:
    (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    partial = path.with_suffix(".partial")
    narrow = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(narrow, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes the file private
    partial.replace(path)


def _eagle3_config(trunk: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a Llama layer with the trunk's sizes."""
    shared = (
        "bos_token_id dtype eos_token_id hidden_act hidden_size initializer_range intermediate_size "
        "max_position_embeddings num_attention_heads num_key_value_heads pad_token_id rms_norm_eps "
        "rope_parameters vocab_size"
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: trunk[name] for name in shared.split()},
        "attention_bias": False,
        "norm_before_residual": True,
        "head_dim": trunk["hidden_size"] // trunk["num_attention_heads"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": trunk["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(EAGLE3_LAYERS),
    }
