"""Compute how many of vLLM's blocks a request takes.

Leans on: KVCacheSpec.max_memory_usage_bytes, with which vLLM decides whether a pool holds a request at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def most_blocks(scheduler: Any) -> Callable[..., int]:
    """Return a function of tokens and requests: the most blocks that they take; windows limit them."""
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    config = scheduler.vllm_config
    limits = [
        (one.block_size, -(-one.max_memory_usage_bytes(config) // one.page_size_bytes)) for one in specs
    ]

    def most(tokens: int, requests: int = 1) -> int:
        return sum(min(-(-tokens // size), limit * requests) for size, limit in limits)

    return most
