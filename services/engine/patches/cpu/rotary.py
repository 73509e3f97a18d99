"""Rotate a query of heads, as in DeepSeek's attention, by the positions of its own tokens.

Leans on: vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward_cpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    replace(RotaryEmbedding, "forward_cpu", flattening, ("self", "positions", "query", "key"))


def flattening(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that flattens [..., heads, size] to [..., heads * size], which vLLM's rotates right."""

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        with_heads = positions.dim() + 2
        flat = [
            one.flatten(-2) if one is not None and one.dim() == with_heads else one for one in (query, key)
        ]
        rotated = shipped(self, positions, *flat)
        for given, one in zip((query, key), rotated, strict=True):
            if given is not None and one.data_ptr() != given.data_ptr():
                given.copy_(one.view_as(given))  # a slice was copied; callers rely on the change in place
        return query, key

    return forward_cpu
