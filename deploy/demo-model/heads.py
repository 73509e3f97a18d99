"""The demo model's two drafters as torch modules, with the tensor names and arithmetic that vLLM expects.

`MtpHead` is a layer of multi-token prediction as in MiMo (vllm/model_executor/models/mimo_mtp.py),
`Eagle3Head` the drafter of EAGLE-3 (Li et al., 2025; vllm/model_executor/models/llama_eagle3.py). From the
trunk's hidden state of a token and the embedding of the next token, both predict the token after that. For
further tokens of a draft they use their own hidden state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

# Keys and values [B, H, T, D] of each step of a draft so far.
KeyValues: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
# EAGLE-3's input: the hidden states after this many layers.
EAGLE3_LAYERS = (2, 5, 8)


class DraftAttention(nn.Module):
    """Attention over a drafter's cache in the middle of a draft.

    The draft of token j at position p began at p - j. The cache has the entries for the trunk's hidden states
    up to p - j, and then one entry per step of the draft (EAGLE-3's training-time test).
    """

    def __init__(self, config: Qwen2Config, inputs: int, *, bias: bool) -> None:
        super().__init__()
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._width = config.hidden_size // self._heads
        self.q_proj = nn.Linear(inputs, self._heads * self._width, bias=bias)
        self.k_proj = nn.Linear(inputs, self._kv_heads * self._width, bias=bias)
        self.v_proj = nn.Linear(inputs, self._kv_heads * self._width, bias=bias)
        self.o_proj = nn.Linear(self._heads * self._width, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rope: Rope, mask: torch.Tensor, cache: KeyValues) -> torch.Tensor:
        """Attend from x [B, T, inputs] in step len(cache); mask [B, 1, T, T] selects the entries of step 0."""
        rows, length, _ = x.shape
        query = rope.turned(self._split(self.q_proj(x), self._heads))
        key = rope.turned(self._split(self.k_proj(x), self._kv_heads))
        value = self._split(self.v_proj(x), self._kv_heads)
        groups = self._heads // self._kv_heads
        cache.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        step, (first_key, first_value) = len(cache) - 1, cache[0]
        scores = (query @ first_key.transpose(2, 3)).float().masked_fill(~mask, -1e9)
        # Shifted right, [B, H, T, D]; the positions that wrap around are masked.
        drafted = [(k.roll(step - i, 2), v.roll(step - i, 2)) for i, (k, v) in enumerate(cache) if i]
        own = [(query * k).sum(-1, keepdim=True).float() for k, _ in drafted]
        shares = torch.cat([scores, *own], -1).mul(self._width**-0.5).softmax(-1).to(value.dtype)
        out = shares[..., :length] @ first_value
        for i, (_, v) in enumerate(drafted):
            out = out + shares[..., length + i, None] * v
        mixed: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return mixed

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self._width)).transpose(1, 2)


class Rope:
    """Rotary position embedding at `positions` [B, T], in the half-split order of Qwen2 and Llama."""

    def __init__(self, positions: torch.Tensor, width: int, theta: float) -> None:
        self.positions = positions
        frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = positions[:, None, :, None].float() * frequencies
        self._cos, self._sin = angles.cos(), angles.sin()

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        turned = [first * self._cos - second * self._sin, second * self._cos + first * self._sin]
        return torch.cat(turned, -1).to(x.dtype)


class Layer(nn.Module):
    """A decoder layer with the given norms, whose attention has `inputs` inputs."""

    def __init__(self, config: Qwen2Config, norms: str, inputs: int, *, bias: bool) -> None:
        super().__init__()
        for name in norms.split():
            setattr(self, name, Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.self_attn = DraftAttention(config, inputs, bias=bias)
        self.mlp = Qwen2MLP(config)


class Head(nn.Module, ABC):
    """A drafter: `start` returns the hidden states for step 0, `forward` runs one step."""

    prefix = ""  # vLLM expects this prefix before the weights' names

    @abstractmethod
    def start(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the input of step 0 from the trunk's hidden states [B, T, H] before each layer."""

    @abstractmethod
    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, rope: Rope, mask: torch.Tensor, cache: KeyValues
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step; return the inputs of the output embedding and of the next step, both [B, T, H]."""


class MtpHead(Head):
    """The MTP layer of MiMo, on the last layer's output before the trunk's final norm."""

    prefix = "model."

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        width = config.hidden_size
        norms = "token_layernorm hidden_layernorm input_layernorm post_attention_layernorm final_layernorm"
        layer = Layer(config, norms, width, bias=True)
        layer.input_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_layers = nn.ModuleList([layer])

    def start(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        return states[-1]

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, rope: Rope, mask: torch.Tensor, cache: KeyValues
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.mtp_layers[0]
        embeds = torch.where(rope.positions[..., None] == 0, 0, embeds)  # vLLM and MiMo do the same
        x = layer.input_proj(torch.cat([layer.hidden_layernorm(hidden), layer.token_layernorm(embeds)], -1))
        x = x + layer.self_attn(layer.input_layernorm(x), rope, mask, cache)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        out = layer.final_layernorm(x)
        return out, out


class Eagle3Head(Head):
    """The drafter of EAGLE-3, with the trunk's whole vocabulary and its embedding at both ends."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(len(EAGLE3_LAYERS) * width, width, bias=False)
        norms = "input_layernorm hidden_norm post_attention_layernorm"
        self.midlayer = Layer(config, norms, 2 * width, bias=False)
        self.norm = Qwen2RMSNorm(width, config.rms_norm_eps)

    def start(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        combined: torch.Tensor = self.fc(torch.cat([states[i] for i in EAGLE3_LAYERS], -1))
        return combined

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, rope: Rope, mask: torch.Tensor, cache: KeyValues
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.midlayer
        # The trunk's states are a hundred times larger than a new layer's output, which is therefore added to
        # their norm (`norm_before_residual`).
        hidden = layer.hidden_norm(hidden)
        both = torch.cat([layer.input_layernorm(embeds), hidden], -1)
        x = hidden + layer.self_attn(both, rope, mask, cache)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x), x


HEADS: dict[str, type[Head]] = {"mtp": MtpHead, "eagle3": Eagle3Head}
