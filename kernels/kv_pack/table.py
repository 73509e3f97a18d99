"""Describe where each layer's blocks are in memory, and where they go in a record."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

WORD = 8  # bytes copied and digested at once; every offset and size is a multiple of it
SCALE_BYTES = 4  # float32
AS_IS = "auto"
WIRE_DTYPES = (AS_IS, "fp8_e4m3", "int8")

# Each format's largest value, to which a row's largest magnitude is scaled.
LARGEST = {"fp8_e4m3": 448.0, "int8": 127.0}
# Rows of smaller magnitude come back as zeros, because LARGEST / TINY must be finite in float32.
TINY = 2.0**-96


class PartKind(enum.IntEnum):
    """The form of a layer in a record: as is, or quantised from this dtype."""

    AS_IS = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3


class TableColumn(enum.IntEnum):
    """The columns of `KVTable.columns`. Sizes and offsets are in bytes."""

    BASE = 0  # address of block 0
    STRIDE = 1  # distance from one block to the next
    SIZE = 2  # size of a block
    OFFSET = 3  # offset of the layer's part in a record
    KIND = 4
    ROWS = 5  # rows per block, each with a scale
    WIDTH = 6  # elements per row
    SCALES = 7  # offset of the scales in a record


_KINDS = {torch.float32: PartKind.FLOAT32, torch.float16: PartKind.FLOAT16, torch.bfloat16: PartKind.BFLOAT16}


class Place(NamedTuple):
    """A layer's place in a record, in bytes from the record's start."""

    offset: int
    scales: int = 0  # offset of the scales of a quantised part


class KVTable:
    """The layers of one cache in one wire format. Immutable; keeps the tensors alive.

    A record holds one block of every layer, in the given order. An unquantised part is the block's bytes. A
    quantised part is one byte per element, in the block's order, then one float32 scale per row. Layers of
    one-byte elements are never quantised.

    With explicit places, the parts are pieces of another table's records. Such a table can only unpack, and
    skips the parts of a record that it does not name.
    """

    def __init__(
        self,
        blocks: Sequence[torch.Tensor],
        widths: Sequence[int],
        wire: str = AS_IS,
        places: Sequence[Place] | None = None,
        record_bytes: int = 0,
    ) -> None:
        """Describe a cache. Raises ValueError for a layer that cannot be packed.

        blocks: [num_blocks, elements] per layer, the last dimension contiguous, all on one device. widths:
        per layer, how many elements share a scale; used only for quantised layers. places: per layer, in
        records of `record_bytes`; by default one after another.
        """
        if wire not in WIRE_DTYPES:
            raise ValueError(f"unknown wire format {wire!r}; allowed: {', '.join(WIRE_DTYPES)}")
        if not blocks or len({layer.device for layer in blocks}) != 1:
            raise ValueError("the layers of a table must be on one device, and at least one")
        self.wire = wire
        self.fp8 = wire == "fp8_e4m3"
        self.on_cpu = blocks[0].device.type == "cpu"
        self.blocks = tuple(blocks)
        self.widths = tuple(widths)
        self.num_blocks = min(layer.shape[0] for layer in blocks)
        self.columns: npt.NDArray[np.int64] = np.zeros((len(blocks), len(TableColumn)), np.int64)
        offset = 0
        for number, (row, layer, width) in enumerate(zip(self.columns, blocks, widths, strict=True)):
            row[:] = _row(layer, width, wire, offset)
            offset += part_bytes(row)
            if places is not None:
                row[[TableColumn.OFFSET, TableColumn.SCALES]] = places[number]
        self.record_bytes = offset if places is None else record_bytes

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.blocks[0].device

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes per layer in a record."""
        return tuple(part_bytes(row) for row in self.columns)


def part_bytes(row: npt.NDArray[np.int64]) -> int:
    """Return the bytes of one layer in a record. row: one of `KVTable.columns`."""
    if row[TableColumn.KIND] == PartKind.AS_IS:
        return int(row[TableColumn.SIZE])
    return scaled_bytes(int(row[TableColumn.ROWS]), int(row[TableColumn.WIDTH]))


def scaled_bytes(rows: int, width: int) -> int:
    """Return the bytes of `rows` quantised rows, scales included."""
    return rows * (width + SCALE_BYTES)


def _row(layer: torch.Tensor, width: int, wire: str, offset: int) -> tuple[int, ...]:
    size, stride = layer.shape[1] * layer.element_size(), layer.stride(0) * layer.element_size()
    shape = f"a layer of {layer.dtype} with {layer.shape[1]} elements a block"
    if layer.dim() != 2 or (layer.shape[1] > 1 and layer.stride(1) != 1):
        raise ValueError(f"{shape}: a block must be one piece of memory")
    if math.gcd(size, stride, layer.data_ptr()) % WORD:
        raise ValueError(f"{shape}: its blocks must begin and end at multiples of {WORD} bytes")
    place = (layer.data_ptr(), stride, size, offset)
    if wire == AS_IS or layer.element_size() == 1:
        return (*place, PartKind.AS_IS, 0, 0, 0)
    kind = _KINDS.get(layer.dtype)
    if kind is None:
        raise ValueError(f"{shape}: no {wire} is made of {layer.dtype}")
    rows, rest = divmod(layer.shape[1], width)
    if rest or rows % 2 or width % WORD:
        raise ValueError(
            f"{shape}: {wire} needs an even number of rows, of a multiple of {WORD} elements; these: {width}"
        )
    return (*place, kind, rows, width, offset + rows * width)
