"""An image's embeddings as bytes, with the shape that gives them their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.handoff.records import Bytes

RECORD_BYTES = 64 << 10
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2}
)  # keyed by dtype


@dataclass(frozen=True)
class Form:
    """The form of a model's embeddings."""

    compatibility_hash: str  # hex; equal on all workers whose embeddings are the same
    width: int  # values per row
    dtype: str  # as torch names it, without "torch."

    @property
    def row_bytes(self) -> int:
        return self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Rows of `width` values of `dtype`. `data`: [rows * width * item size] uint8."""

    data: Bytes
    rows: int
    width: int
    dtype: str


def records_for(size: int) -> int:
    """Return the number of records that `size` bytes take."""
    return -(-size // RECORD_BYTES)
