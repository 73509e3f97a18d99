"""Pack the KV blocks of all layers into one contiguous buffer with a single kernel launch, and unpack them.

Both directions also compute digests of the records.

    table = KVTable(layers, widths, "fp8_e4m3")          once for each cache
    pack(table, block_ids, records, digests)             blocks -> records [n, table.record_bytes]
    unpack(table, records, block_ids, digests)           records -> blocks

`records` and `digests` are on the same device as the table's tensors. On CUDA they are tensors, and the work
is queued on the current stream without waiting. On the CPU they are tensors or numpy arrays, and the calling
thread does all the work before the call returns. To pack only some of the blocks, pass slices of `block_ids`,
`records` and `digests`. README.md has the maths.
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

    block_ids: [n] int64, blocks of the table. records: [n, table.record_bytes] uint8, contiguous,
    overwritten. digests: [n] 64-bit integers, overwritten with the bits of a uint64. Raises ValueError if
    shapes do not match.
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
    """Scatter records to blocks, in the cache's own dtype; skip negative block ids.

    Shapes are as in `pack`. `digests` are overwritten with the digests of the records; on a GPU, only of the
    parts that the table names. On the CPU they may be None. Raises ValueError if shapes do not match.
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


# Cached because packing one piece of a handoff takes only 20 us.


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
    array: npt.NDArray[Any] = buffer.numpy() if isinstance(buffer, torch.Tensor) else buffer
    return array.view(dtype)
