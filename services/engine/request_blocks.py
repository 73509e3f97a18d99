"""Compute how many of vLLM's blocks a request takes.

Leans on: KVCacheSpec.max_memory_usage_bytes, with which vLLM decides whether a pool holds a request at all.
"""

from __future__ import annotations

from typing import Any


class RequestBlocks:
    """The blocks of a loaded engine's requests, in all groups of layers."""

    def __init__(self, scheduler: Any) -> None:
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        self._groups = [
            (spec.block_size, -(-spec.max_memory_usage_bytes(scheduler.vllm_config) // spec.page_size_bytes))
            for spec in specs
        ]

    def most(self, tokens: int, requests: int = 1) -> int:
        """Return the most blocks that so many requests with these tokens take; windows limit them."""
        return sum(min(-(-tokens // size), most * requests) for size, most in self._groups)
