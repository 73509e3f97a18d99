"""The training objective of a drafter: predict the frozen trunk's output several tokens ahead."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from heads import HEADS, Head, KeyValues, Rope
from torch import nn
from torch.nn import functional
from trainer import Batch
from transformers import Qwen2Config, Qwen2ForCausalLM

# Tokens per draft in training. Served drafts may be longer.
STEPS = 4
STEP_DECAY = 0.8


def new_head(kind: str, trunk: Qwen2ForCausalLM) -> Head:
    """Return a new head. Its last norm is copied from the trunk, which has the same output embedding."""
    config: Qwen2Config = trunk.config
    head = HEADS[kind](config)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    last = "mtp_layers.0.final_layernorm.weight" if kind == "mtp" else "norm.weight"
    with torch.no_grad():
        head.get_parameter(last).copy_(trunk.model.norm.weight)
    return head


def load_trunk(folder: Path) -> Qwen2ForCausalLM:
    """Load the trunk as it is served, in bfloat16 and frozen."""
    trunk = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    trunk.set_attn_implementation("eager")
    return trunk.requires_grad_(requires_grad=False)


def trunk_states(
    trunk: Qwen2ForCausalLM, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
) -> list[torch.Tensor]:
    """Return the hidden states [B, T, H] before each layer and after the last one."""
    states = [trunk.model.embed_tokens(ids)]
    rotary = trunk.model.rotary_emb(states[0], positions)
    hidden_places = torch.where(mask, 0.0, torch.finfo(states[0].dtype).min).to(states[0].dtype)
    given = {"attention_mask": hidden_places, "position_ids": positions, "position_embeddings": rotary}
    for layer in trunk.model.layers:
        states.append(layer(states[-1], **given))
    return states


def document_mask(documents: torch.Tensor, behind: int) -> torch.Tensor:
    """Return a mask [B, 1, T, T] of the same document's positions that are at least `behind` back.

    `documents` [B, T] numbers the documents of each row.
    """
    place = torch.arange(documents.shape[1])
    same = documents[:, :, None] == documents[:, None, :]
    return (same & (place[None, :] <= place[:, None] - behind))[:, None]


def draft_features(
    head: Head, trunk: Qwen2ForCausalLM, ids: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the inputs [B, T, H] of the output embedding: the trunk's, and each step's."""
    inputs, places = ids[:, :-1], positions[:, :-1]
    documents = (places == 0).cumsum(1)
    config = trunk.config
    with torch.no_grad():
        states = trunk_states(trunk, inputs, places, document_mask(documents, 0))
        wanted = trunk.model.norm(states[-1])
        embeds = trunk.model.embed_tokens(ids[:, 1:])
    width = config.hidden_size // config.num_attention_heads
    rope = Rope(places, width, config.rope_parameters["rope_theta"])
    hidden, steps = head.start(states), []
    cache: KeyValues = []
    for step in range(STEPS):
        out, hidden = head(hidden, embeds, rope, document_mask(documents, step), cache)
        hidden = torch.roll(hidden, 1, dims=1)
        steps.append(out)
    return wanted, steps


class DraftLoss:
    """The mean cross-entropy of the head's distributions against the trunk's, over `STEPS` tokens.

    As in serving, steps use their own hidden states and the cache entries of earlier steps (training-time
    test of EAGLE-3).
    """

    def __init__(self, head: Head, trunk: Qwen2ForCausalLM) -> None:
        self._output = trunk.lm_head
        self._features = torch.compile(functools.partial(draft_features, head, trunk), dynamic=False)

    def __call__(self, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted, steps = self._features(batch.ids, batch.positions)
        total = torch.zeros(())
        for step, (out, counted) in enumerate(zip(steps, counted_places(batch.weights), strict=True)):
            with torch.no_grad():
                target = self._output(wanted[:, 1:][counted]).float().softmax(-1)
            logits = self._output(out[:, :-1][counted].to(torch.bfloat16)).float()
            loss = functional.cross_entropy(logits, target, reduction="sum") / counted.sum().clamp(min=1)
            total = total + STEP_DECAY**step * loss
        return total / sum(STEP_DECAY**step for step in range(STEPS))


def counted_places(weights: torch.Tensor) -> list[torch.Tensor]:
    """Return, for each step, the positions [B, T - 1] that count, given the tokens' `weights` [B, T + 1].

    Step j at position p predicts token p + 2 of a draft that began after token p - j + 1. All these tokens
    must be the trunk's own.
    """
    spoken = weights > 0
    counted, masks = spoken[:, 1:-1] & spoken[:, 2:], []
    for step in range(STEPS):
        if step:
            counted = counted & functional.pad(spoken[:, 1:-1], (step, 0))[:, : counted.shape[1]]
        masks.append(counted)
    return masks
