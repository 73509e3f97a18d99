"""The demo model: a Qwen2 of 5.8 million parameters, and its export as vLLM and transformers load it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from chat import END_OF_TEXT, IM_END
from safetensors.torch import save_file
from tokenizer import CONTEXT, VOCABULARY, token_id
from tokenizers import Tokenizer
from torch.nn import functional
from trainer import Batch
from transformers import Qwen2Config, Qwen2ForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model_config(tokenizer: Tokenizer) -> Qwen2Config:
    """Return the configuration: eight narrow layers, as copying from the context needs depth."""
    return Qwen2Config(
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


def new_model(tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """Return a model with new float32 weights."""
    config = model_config(tokenizer)
    return Qwen2ForCausalLM(config).float()


class NextToken:
    """The mean cross-entropy of the next token, each counted by its weight."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        # Plain attention, compiled: 9.6k tokens/s; the fused kernel of torch 2.13, not compiled: 6.6k (two cores of an
        # EPYC with AVX-512 BF16, windows of 512). One compilation for each window length.
        model.set_attn_implementation("eager")
        self._forward = torch.compile(model.forward, dynamic=False)

    def __call__(self, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self._forward(input_ids=batch.ids[:, :-1], use_cache=False).logits
        targets, weights = batch.ids[:, 1:].flatten(), batch.weights[:, 1:].flatten()
        losses = functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
        return (losses * weights).sum() / weights.sum().clamp(min=1.0)


def export(model: Qwen2ForCausalLM, tokenizer_folder: Path, target: Path) -> None:
    """Write bfloat16 weights, configuration and tokenizer to `target`, replacing older files one by one."""
    target.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    partial = target / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes it readable by its owner alone
    os.replace(partial, target / "model.safetensors")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder / name, target / name)
    model.config.save_pretrained(target)
    config = model.config
    generation = {
        "eos_token_id": [config.eos_token_id, config.pad_token_id],
        "pad_token_id": config.pad_token_id,
        "do_sample": False,
    }
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
