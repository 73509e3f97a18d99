"""The layers of a rank's KV cache, described so that two ranks can compare theirs."""

from __future__ import annotations

from dataclasses import dataclass

from baton.protos.handoff_pb2 import Layer


@dataclass(frozen=True)
class CacheLayer:
    """One layer's part of a block."""

    name: str
    dtype: str  # torch's name without "torch."
    block_shape: tuple[int, ...]  # as in a manifest; [heads, tokens, channels] for ordinary attention
    block_strides: tuple[int, ...]  # elements
    block_bytes: int
    record_bytes: int  # of its part in a record
    group: int = 0  # whose blocks it has a part of

    def to_proto(self) -> Layer:
        """Return the layer as a manifest describes it; strides travel in the compatibility hash alone."""
        return Layer(
            name=self.name,
            dtype=self.dtype,
            block_shape=self.block_shape,
            block_bytes=self.block_bytes,
            record_bytes=self.record_bytes,
            group=self.group,
        )
