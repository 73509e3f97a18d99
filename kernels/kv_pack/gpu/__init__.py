"""The GPU form, in Triton: packing is one launch and unpacking another, whatever layers the table has.

A program handles one tile of one layer of one block. `tiles_of` lays the tiles out once per cache and
direction, so a program reads its parameters from one line of 64 bytes. Nothing here waits for the device or
depends on the data, so a CUDA graph can capture a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton

from baton.kernels.kv_pack.gpu import packing, unpacking
from baton.kernels.kv_pack.gpu.packing import pack_kernel
from baton.kernels.kv_pack.gpu.tiles import TILE_WORDS, Cut, tiles_of
from baton.kernels.kv_pack.gpu.unpacking import unpack_kernel
from baton.kernels.kv_pack.table import WORD, KVTable, PartKind, TableColumn


@dataclass(frozen=True)
class _Launch:
    tiles: torch.Tensor  # [num_tiles, 8] int64, on the device
    record_bytes: int
    warps: int
    constants: dict[str, Any]


_packs: WeakKeyDictionary[KVTable, _Launch] = WeakKeyDictionary()
_unpacks: WeakKeyDictionary[KVTable, _Launch] = WeakKeyDictionary()


def pack(table: KVTable, block_ids: torch.Tensor, records: torch.Tensor, digests: torch.Tensor) -> None:
    """Like baton.kernels.kv_pack.pack, for tensors on the table's device."""
    launch = _packs.get(table)
    if launch is None:
        launch = _packs[table] = _prepare(table, packing.cut(table))
    _start(pack_kernel, launch, block_ids, records, digests)


def unpack(table: KVTable, records: torch.Tensor, block_ids: torch.Tensor, digests: torch.Tensor) -> None:
    """Like baton.kernels.kv_pack.unpack, for tensors on the table's device."""
    launch = _unpacks.get(table)
    if launch is None:
        launch = _unpacks[table] = _prepare(table, unpacking.cut(table))
    _start(unpack_kernel, launch, block_ids, records, digests)


def _start(
    kernel: Any, launch: _Launch, block_ids: torch.Tensor, records: torch.Tensor, digests: torch.Tensor
) -> None:
    digests.zero_()
    if not len(block_ids):
        return
    tiles = len(launch.tiles)
    aligned = 16 if launch.constants["ALIGN"] == 16 and records.data_ptr() % 16 == 0 else WORD
    kernel[(tiles * len(block_ids),)](
        launch.tiles,
        tiles,
        block_ids,
        records,
        launch.record_bytes,
        digests,
        **launch.constants | {"ALIGN": aligned},
        num_warps=launch.warps,
        enable_fp_fusion=False,  # a fused multiply-add would round codes differently from the CPU
    )


def _prepare(table: KVTable, cut: Cut) -> _Launch:
    columns = table.columns
    kinds = set(columns[:, TableColumn.KIND].tolist())
    places = columns[:, [TableColumn.BASE, TableColumn.STRIDE, TableColumn.SIZE, TableColumn.OFFSET]]
    interpreted = triton.knobs.runtime.interpret
    constants = {
        "AS_IS": PartKind.AS_IS in kinds,
        "F32": PartKind.FLOAT32 in kinds,
        "F16": PartKind.FLOAT16 in kinds,
        "BF16": PartKind.BFLOAT16 in kinds,
        "FP8": table.fp8,
        "NATIVE": not interpreted and torch.cuda.get_device_capability(table.device) >= (8, 9),
        "ALIGN": 16 if not (places % 16).any() and table.record_bytes % 16 == 0 else WORD,
        "WORDS": TILE_WORDS,
        **cut.constants,
    }
    tiles = [tile for row in columns.tolist() for tile in tiles_of(row, cut.rows)]
    on_device = torch.tensor(tiles, dtype=torch.int64, device=table.device)
    return _Launch(on_device, table.record_bytes, cut.warps, constants)
