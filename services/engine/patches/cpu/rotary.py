"""Rotate queries of shape [tokens, heads, size], as in DeepSeek's attention, by their own tokens' positions.

vLLM treats them as [batch, tokens, size], and so rotates heads by the positions of other tokens. With queries
of shape [..., heads * size] it is correct.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu")
def _flatten_heads(original: Any, self: Any, positions: Any, query: Any, key: Any = None) -> Any:
    with_heads = positions.dim() + 2
    flat = [one.flatten(-2) if one is not None and one.dim() == with_heads else one for one in (query, key)]
    rotated = original(self, positions, *flat)
    for given, one in zip((query, key), rotated, strict=True):
        if given is not None and one.data_ptr() != given.data_ptr():
            given.copy_(one.view_as(given))  # flatten copied a slice; callers rely on the change in place
    return query, key
