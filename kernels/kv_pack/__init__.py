"""Pack all layers' KV blocks into one contiguous buffer in one launch, and back, with digests.

    table = KVTable(layers, widths, "fp8_e4m3")          once for each cache
    pack(table, block_ids, records, digests)             blocks -> records [n, table.record_bytes]
    unpack(table, records, block_ids, digests)           records -> blocks

`records` and `digests` lie on the device of the table's tensors: tensors on CUDA, where all work is queued on
the current stream and nothing waits; tensors or numpy arrays on the CPU, where all work is done on return, on
the calling thread. To pack only some of the blocks, pass slices of `block_ids`, `records` and `digests`.
README.md has the maths.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from baton.kernels.kv_pack.table import AS_IS, SCALE_BYTES, WIRE_DTYPES, WORD, KVTable, Place, scaled_bytes

__all__ = [
    "AS_IS",
    "SCALE_BYTES",
    "WIRE_DTYPES",
    "WORD",
    "Buffer",
    "KVTable",
    "Place",
    "digest",
    "pack",
    "scaled_bytes",
    "unpack",
]

Buffer: TypeAlias = torch.Tensor | npt.NDArray[Any]


def pack(table: KVTable, block_ids: Buffer, records: Buffer, digests: Buffer) -> None:
    """Gather blocks into records.

    block_ids: [n] int64, each a block of the table; records: [n, table.record_bytes] uint8, contiguous;
    digests: [n], 64-bit integers, each with the bits of a uint64. The latter two are overwritten.
    Raises ValueError for buffers of another shape.
    """
    _check(table, block_ids, records, digests)
    if table.on_cpu:
        found = _array(digests, np.uint64)
        _cpu().pack(
            table.columns,
            table.fp8,
            _array(block_ids, np.int64),
            _address(records),
            table.record_bytes,
            found,
        )
    else:
        _gpu().pack(table, block_ids, records, digests)


def unpack(table: KVTable, records: Buffer, block_ids: Buffer, digests: Buffer | None) -> None:
    """Scatter records to blocks, in the cache's own dtype; a negative block id is skipped.

    Shapes as in `pack`; `digests` are overwritten with those of the records, on a GPU with those of the parts
    that the table names. On the CPU they may be left out. Raises ValueError for buffers of another shape.
    """
    _check(table, block_ids, records, digests)
    if table.on_cpu:
        if digests is not None:
            digest(records, digests)
        ids = _array(block_ids, np.int64)
        _cpu().unpack(table.columns, table.fp8, _address(records), table.record_bytes, ids)
    else:
        _gpu().unpack(table, records, block_ids, digests)


def digest(records: Buffer, digests: Buffer) -> None:
    """Compute the digests of records in host memory.

    records: [n, record_bytes] uint8, contiguous, each of whole words; digests: [n], overwritten.
    """
    _cpu().digest(_address(records), records.shape[1], _array(digests, np.uint64))


# Imported on first use, and cached: a piece of a handoff is 20 us of work.


@functools.cache
def _cpu() -> ModuleType:
    return importlib.import_module("baton.kernels.kv_pack.cpu")


@functools.cache
def _gpu() -> ModuleType:
    return importlib.import_module("baton.kernels.kv_pack.gpu")


def _check(table: KVTable, block_ids: Buffer, records: Buffer, digests: Buffer | None) -> None:
    count = len(block_ids)
    found = tuple(records.shape), count if digests is None else len(digests)
    if found != ((count, table.record_bytes), count):
        raise ValueError(
            f"{count} blocks need records [{count}, {table.record_bytes}] and {count} digests; given: {found}"
        )


def _address(buffer: Buffer) -> int:
    return int(buffer.data_ptr() if isinstance(buffer, torch.Tensor) else buffer.ctypes.data)


def _array(buffer: Buffer, dtype: Any) -> npt.NDArray[Any]:
    """Return the same memory as a numpy array of 64-bit integers."""
    array: npt.NDArray[Any] = buffer.numpy() if isinstance(buffer, torch.Tensor) else buffer
    return array.view(dtype)
