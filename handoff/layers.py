"""The layers of a rank's KV cache, as the compatibility hash compares them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheLayer:
    """One layer's part of a block."""

    name: str
    dtype: str  # torch's name without "torch."
    block_shape: tuple[int, ...]  # [heads, tokens, channels]; one head for MLA
    block_strides: tuple[int, ...]  # elements
    block_bytes: int
    record_bytes: int  # of its part in a record
    group: int = 0  # whose blocks it has a part of
