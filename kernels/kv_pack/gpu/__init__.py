"""The GPU form, in Triton: one launch packs, one unpacks, whatever layers the table has.

A program handles one tile of one layer of one block. Tiles are laid out once for each cache (`_tiles`), so
that a program finds its place in a line of 64 bytes. Nothing here waits for the device or depends on the
data: a launch can be captured in a CUDA graph.
"""

# ruff: noqa: PLR0917, SIM102 (device code: a compile-time `if` stands alone)

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from baton.kernels.kv_pack.table import LARGEST, SCALE_BYTES, TINY, WORD, KVTable, PartKind, TableColumn

TILE_WORDS = 2048  # 16 KiB: 64 bytes for each thread
TILE_ELEMENTS = 8192
_WARPS = 8
# A tile's numbers: base, stride, offset in block, offset in record, words or rows, kind, width, offset of
# scales.
_TILE = tl.constexpr(8)

# One compiled kernel serves every chunk: it depends on none of these, but for what ALIGN states.
_VARYING = ["num_tiles", "block_ids", "records", "record_bytes", "digests"]

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_AS_IS = tl.constexpr(int(PartKind.AS_IS))
_FLOAT32 = tl.constexpr(int(PartKind.FLOAT32))
_FLOAT16 = tl.constexpr(int(PartKind.FLOAT16))
_BFLOAT16 = tl.constexpr(int(PartKind.BFLOAT16))
_TINY = tl.constexpr(TINY)
_FP8_LARGEST = tl.constexpr(LARGEST["fp8_e4m3"])
_INT8_LARGEST = tl.constexpr(LARGEST["int8"])
_INTEGERS = tl.constexpr(1.5 * 2**23)  # plus it, float32 rounds to integers: cpu.py


@triton.jit
def _at(address, dtype: tl.constexpr, ALIGN: tl.constexpr):
    """Turn a number into a pointer that is aligned, so that several elements are loaded at once."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), ALIGN)


@triton.jit
def _mix(words, positions):
    """Mix words (README.md, "The digest"): a bijection of the word for each position. uint64."""
    x = (words ^ ((positions + 1).to(tl.uint64) * _GOLDEN)) * _FIRST
    x = (x ^ (x >> 32)) * _SECOND
    return x ^ (x >> 32)


@triton.jit
def _add(digests, record, total):
    tl.atomic_add(digests + record, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _words_of(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Join [ROWS, WIDTH] bytes in int32 to little-endian words: [ROWS, WIDTH // 8] uint64."""
    places = tl.arange(0, 4)[None, None, None, :] * 8
    halves = tl.sum(
        tl.reshape(codes, [ROWS, WIDTH // 8, 2, 4]) << places, axis=3
    )  # [ROWS, WIDTH // 8, 2] int32
    wide = halves.to(tl.uint32, bitcast=True).to(tl.uint64)
    return tl.sum(wide << (tl.arange(0, 2)[None, None, :] * 32).to(tl.uint64), axis=2)


@triton.jit
def _digest_codes(codes, valid, first, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Digest codes [ROWS, WIDTH], int32 of 0 to 255, 0 beyond a row's width; first: the first word."""
    words = _words_of(codes, ROWS, WIDTH)
    row, word = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH // 8)[None, :]
    mixed = _mix(words, first + row * (width // 8) + word)
    return tl.sum(tl.where((row < valid) & (word < width // 8), mixed, 0))


@triton.jit
def _digest_scales(scales, valid, first, ROWS: tl.constexpr):
    """Digest scales: [ROWS] float32; an even number of them is valid."""
    bits = tl.reshape(scales.to(tl.uint32, bitcast=True).to(tl.uint64), [ROWS // 2, 2])
    words = tl.sum(bits << (tl.arange(0, 2)[None, :] * 32).to(tl.uint64), axis=1)
    pair = tl.arange(0, ROWS // 2)
    return tl.sum(tl.where(2 * pair < valid, _mix(words, first + pair), 0))


@triton.jit
def _load_elements(
    address, offsets, mask, kind, ALIGN: tl.constexpr,
    F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Load as float32. Only the dtypes that the table has are compiled in."""
    values = tl.zeros(offsets.shape, tl.float32)
    if F32:
        if kind == _FLOAT32:
            values = tl.load(_at(address, tl.float32, ALIGN) + offsets, mask=mask, other=0.0)
    if F16:
        if kind == _FLOAT16:
            halves = tl.load(_at(address, tl.float16, ALIGN) + offsets, mask=mask, other=0.0)
            values = halves.to(tl.float32)
    if BF16:
        if kind == _BFLOAT16:
            halves = tl.load(_at(address, tl.bfloat16, ALIGN) + offsets, mask=mask, other=0.0)
            values = halves.to(tl.float32)
    return values


@triton.jit
def _bfloat16(values, NATIVE: tl.constexpr):
    """Round to the nearest, to even on ties; the interpreter would truncate."""
    if NATIVE:
        return values.to(tl.bfloat16)
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (
        tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    )


@triton.jit
def _store_elements(
    address, offsets, values, mask, kind, ALIGN: tl.constexpr, NATIVE: tl.constexpr,
    F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    if F32:
        if kind == _FLOAT32:
            tl.store(_at(address, tl.float32, ALIGN) + offsets, values, mask=mask)
    if F16:
        if kind == _FLOAT16:
            tl.store(_at(address, tl.float16, ALIGN) + offsets, values.to(tl.float16), mask=mask)
    if BF16:
        if kind == _BFLOAT16:
            halves = _bfloat16(values, NATIVE)
            tl.store(_at(address, tl.bfloat16, ALIGN) + offsets, halves, mask=mask)


@triton.jit
def _encode(scaled, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """Return the codes of values within a format's range: int32 of 0 to 255."""
    if not FP8:
        return (scaled + _INTEGERS).to(tl.int32, bitcast=True) & 0xFF
    if NATIVE:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    bits = scaled.to(tl.int32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    normal = ((rest + 0x7FFFF + ((rest >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2**-9
    code = tl.minimum(tl.where(rest < 0x3C800000, small, normal), 0x7E)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _decode(codes, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """Return codes, uint8, as float32."""
    if not FP8:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = codes.to(tl.int32)
    rest = wide & 0x7F
    small = rest.to(tl.float32) * 0.001953125  # 2**-9
    normal = ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rest < 8, small, normal)
    return tl.where(wide < 128, value, -value)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def _pack(
    tiles, num_tiles, block_ids, records, record_bytes, digests,
    AS_IS: tl.constexpr, F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, ALIGN: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    record, tile = tl.program_id(0) // num_tiles, tiles + _TILE * (tl.program_id(0) % num_tiles)
    kind, count, offset = tl.load(tile + 5), tl.load(tile + 4), tl.load(tile + 3)
    block = tl.load(block_ids + record)
    source = tl.load(tile) + block * tl.load(tile + 1) + tl.load(tile + 2)
    target = records.to(tl.int64) + record.to(tl.int64) * record_bytes
    if AS_IS:
        if kind == _AS_IS:
            at, words_here = tl.arange(0, WORDS), tl.multiple_of(count, ALIGN // 8)
            left = _at(source, tl.uint64, ALIGN)
            right = _at(target + offset, tl.uint64, ALIGN)
            words = tl.load(left + at, mask=at < words_here, other=0, eviction_policy="evict_first")
            tl.store(right + at, words, mask=at < words_here)
            _add(digests, record, tl.sum(tl.where(at < count, _mix(words, offset // 8 + at), 0)))
    if F32 or F16 or BF16:
        if kind != _AS_IS:
            width, scales_at = tl.multiple_of(tl.load(tile + 6), 8), tl.load(tile + 7)
            row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
            at = row[:, None] * width + column[None, :]
            mask = (row[:, None] < count) & (column[None, :] < width)
            values = _load_elements(source, at, mask, kind, ALIGN, F32, F16, BF16)
            # Compared as bits: NaN is above all and makes the scale NaN, so that it is not lost.
            most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
            most = tl.where(most < _TINY, _TINY, most)
            largest = tl.full([ROWS], _FP8_LARGEST if FP8 else _INT8_LARGEST, tl.float32)
            factors, scales = tl.div_rn(largest, most), tl.div_rn(most, largest)
            codes = tl.where(mask, _encode(values * factors[:, None], FP8, NATIVE), 0)
            tl.store(_at(target + offset, tl.uint8, 8) + at, codes.to(tl.uint8), mask=mask)
            tl.store(_at(target + scales_at, tl.float32, 8) + row, scales, mask=row < count)
            total = _digest_codes(codes, count, offset // 8, width, ROWS, WIDTH)
            _add(digests, record, total + _digest_scales(scales, count, scales_at // 8, ROWS))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def _unpack(
    tiles, num_tiles, block_ids, records, record_bytes, digests,
    AS_IS: tl.constexpr, F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, ALIGN: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    record, tile = tl.program_id(0) // num_tiles, tiles + _TILE * (tl.program_id(0) % num_tiles)
    kind, count, offset = tl.load(tile + 5), tl.load(tile + 4), tl.load(tile + 3)
    block = tl.load(block_ids + record)
    kept = tl.where(block >= 0, count, 0)  # no rows of a block that is to be skipped
    target = tl.load(tile) + block * tl.load(tile + 1) + tl.load(tile + 2)
    source = records.to(tl.int64) + record.to(tl.int64) * record_bytes
    if AS_IS:
        if kind == _AS_IS:
            at, words_here = tl.arange(0, WORDS), tl.multiple_of(count, ALIGN // 8)
            left = _at(source + offset, tl.uint64, ALIGN)
            right = _at(target, tl.uint64, ALIGN)
            words = tl.load(left + at, mask=at < words_here, other=0, eviction_policy="evict_first")
            tl.store(right + at, words, mask=at < tl.multiple_of(kept, ALIGN // 8))
            _add(digests, record, tl.sum(tl.where(at < count, _mix(words, offset // 8 + at), 0)))
    if F32 or F16 or BF16:
        if kind != _AS_IS:
            width, scales_at = tl.multiple_of(tl.load(tile + 6), 8), tl.load(tile + 7)
            row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
            at = row[:, None] * width + column[None, :]
            mask = (row[:, None] < count) & (column[None, :] < width)
            codes = tl.load(_at(source + offset, tl.uint8, 8) + at, mask=mask, other=0)
            scales = tl.load(_at(source + scales_at, tl.float32, 8) + row, mask=row < count, other=0.0)
            values = _decode(codes, FP8, NATIVE) * scales[:, None]
            _store_elements(
                target, at, values, mask & (row[:, None] < kept), kind, ALIGN, NATIVE, F32, F16, BF16
            )
            total = _digest_codes(codes.to(tl.int32), count, offset // 8, width, ROWS, WIDTH)
            _add(digests, record, total + _digest_scales(scales, count, scales_at // 8, ROWS))


@dataclass(frozen=True)
class _Launch:
    """The arguments that all launches over a table share."""

    tiles: torch.Tensor  # [num_tiles, 8] int64, on the device
    constants: dict[str, Any]


_launches: WeakKeyDictionary[KVTable, _Launch] = WeakKeyDictionary()


def pack(table: KVTable, block_ids: torch.Tensor, records: torch.Tensor, digests: torch.Tensor) -> None:
    """Do as baton.kernels.kv_pack.pack, for tensors on the table's device."""
    _start(_pack, table, block_ids, records, digests)


def unpack(table: KVTable, records: torch.Tensor, block_ids: torch.Tensor, digests: torch.Tensor) -> None:
    """Do as baton.kernels.kv_pack.unpack, for tensors on the table's device."""
    _start(_unpack, table, block_ids, records, digests)


def _start(
    kernel: Any, table: KVTable, block_ids: torch.Tensor, records: torch.Tensor, digests: torch.Tensor
) -> None:
    launch = _launches.get(table)
    if launch is None:
        launch = _launches[table] = _prepare(table)
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
        table.record_bytes,
        digests,
        **launch.constants | {"ALIGN": aligned},
        num_warps=_WARPS,
        enable_fp_fusion=False,  # a fused multiply-add would round codes otherwise than the CPU does
    )


def _prepare(table: KVTable) -> _Launch:
    columns = table.columns
    kinds = Counter(int(kind) for kind in columns[:, TableColumn.KIND])
    width = triton.next_power_of_2(max(WORD, int(columns[:, TableColumn.WIDTH].max())))
    rows = max(2, TILE_ELEMENTS // width)
    places = columns[:, [TableColumn.BASE, TableColumn.STRIDE, TableColumn.SIZE, TableColumn.OFFSET]]
    interpreted = triton.knobs.runtime.interpret
    native = not interpreted and torch.cuda.get_device_capability(table.device) >= (8, 9)
    constants = {
        "AS_IS": kinds[PartKind.AS_IS] > 0,
        "F32": kinds[PartKind.FLOAT32] > 0,
        "F16": kinds[PartKind.FLOAT16] > 0,
        "BF16": kinds[PartKind.BFLOAT16] > 0,
        "FP8": table.fp8,
        "NATIVE": native,
        "ALIGN": 16 if not (places % 16).any() and table.record_bytes % 16 == 0 else WORD,
        "WORDS": TILE_WORDS,
        "ROWS": rows,
        "WIDTH": width,
    }
    tiles = [tile for row in columns.tolist() for tile in _tiles(row, rows)]
    return _Launch(torch.tensor(tiles, dtype=torch.int64, device=table.device), constants)


def _tiles(row: list[int], rows_a_tile: int) -> list[tuple[int, ...]]:
    """Return one layer's tiles, as even as possible: a nearly empty one would cost as much as a full one."""
    base, stride, size, offset, kind, rows, width, scales = row
    if kind == PartKind.AS_IS:
        return [
            (base, stride, at * WORD, offset + at * WORD, count, kind, 0, 0)
            for at, count in _split(size // WORD, TILE_WORDS)
        ]
    element = size // (rows * width)
    return [
        (
            base,
            stride,
            at * width * element,
            offset + at * width,
            count,
            kind,
            width,
            scales + at * SCALE_BYTES,
        )
        for at, count in _split(rows, rows_a_tile)
    ]


def _split(total: int, most: int) -> list[tuple[int, int]]:
    """Return (start, count) of equal pieces of at most `most`; starts are even, so that no word is cut."""
    step = -(-total // -(-total // most))
    step += step % 2
    return [(at, min(step, total - at)) for at in range(0, total, step)]
