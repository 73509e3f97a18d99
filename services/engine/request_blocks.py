"""Compute how many of vLLM's blocks a request takes.

Leans on: KVCacheSpec.max_memory_usage_bytes, by which vLLM decides whether a pool can hold a request at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def most_blocks(scheduler: Any) -> Callable[..., int]:
    """Return a function from numbers of tokens and requests to the most blocks that they can take."""
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    config = scheduler.vllm_config
    limits = [
        (one.block_size, -(-one.max_memory_usage_bytes(config) // one.page_size_bytes)) for one in specs
    ]

    def most(tokens: int, requests: int = 1) -> int:
        return sum(min(-(-tokens // size), limit * requests) for size, limit in limits)

    return most
