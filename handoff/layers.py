"""The layers of a KV cache as the compatibility hash compares them: before ranks divide their heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.kernels.kv_pack import AS_IS, scaled_bytes


@dataclass(frozen=True)
class CacheLayer:
    """One layer of a block, with the heads of all ranks: what the compatibility hash compares."""

    name: str
    dtype: str  # torch's name without "torch."
    block_shape: tuple[int, ...]  # [heads, tokens, channels]; one head for MLA
    block_strides: tuple[int, ...]  # elements
    block_bytes: int
    row_width: int  # elements that share a scale when quantised
    heads: int = 0  # KV heads; 0: cannot be divided, so both workers need the same number of ranks
    stretches: int = 1  # pieces of memory per block, each with all heads one after another
    group: int = 0

    @property
    def element_bytes(self) -> int:
        return self.block_bytes // math.prod(self.block_shape)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a block; the rank's whole part if heads cannot be divided."""
        return self.block_bytes // max(1, self.heads)

    def part_bytes(self, heads: int, wire_dtype: str) -> int:
        """Return the bytes of `heads` heads in a record."""
        size = heads * self.head_bytes
        if wire_dtype == AS_IS or self.element_bytes == 1:
            return size
        return scaled_bytes(size // self.element_bytes // self.row_width, self.row_width)
