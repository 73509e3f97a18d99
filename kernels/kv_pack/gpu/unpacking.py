"""The unpacking kernel. It pads a row to a power of two and processes elements one by one."""

# ruff: noqa: PLR0917, SIM102 (device code: a compile-time `if` stands alone)

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.kv_pack.gpu.shared import (
    BFLOAT16,
    COPIED,
    FLOAT16,
    FLOAT32,
    TILE,
    VARYING,
    add,
    aligned,
    copy,
    digest_scales,
    mix,
    salts,
)
from baton.kernels.kv_pack.gpu.tiles import WARPS, Cut
from baton.kernels.kv_pack.table import WORD, KVTable, TableColumn

TILE_ELEMENTS = 8192


@triton.jit
def _bfloat16(values, NATIVE: tl.constexpr):
    """Round to the nearest bfloat16, ties to even; the interpreter would truncate."""
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
        if kind == FLOAT32:
            tl.store(aligned(address, tl.float32, ALIGN) + offsets, values, mask=mask)
    if F16:
        if kind == FLOAT16:
            tl.store(aligned(address, tl.float16, ALIGN) + offsets, values.to(tl.float16), mask=mask)
    if BF16:
        if kind == BFLOAT16:
            halves = _bfloat16(values, NATIVE)
            tl.store(aligned(address, tl.bfloat16, ALIGN) + offsets, halves, mask=mask)


@triton.jit
def _decode(codes, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """Return uint8 codes as float32."""
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


@triton.jit
def _words_of(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Join bytes, int32 [ROWS, WIDTH], into little-endian words, uint64 [ROWS, WIDTH // 8]."""
    places = tl.arange(0, 4)[None, None, None, :] * 8
    halves = tl.sum(
        tl.reshape(codes, [ROWS, WIDTH // 8, 2, 4]) << places, axis=3
    )  # [ROWS, WIDTH // 8, 2] int32
    wide = halves.to(tl.uint32, bitcast=True).to(tl.uint64)
    return tl.sum(wide << (tl.arange(0, 2)[None, None, :] * 32).to(tl.uint64), axis=2)


@triton.jit
def _digest_codes(codes, valid, first, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Digest codes [ROWS, WIDTH], int32 of 0 to 255, zero beyond a row's width. first: the first word."""
    words = _words_of(codes, ROWS, WIDTH)
    row, word = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH // 8)[None, :]
    mixed = mix(words, salts(first + row * (width // 8) + word))
    return tl.sum(tl.where((row < valid) & (word < width // 8), mixed, 0))


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=VARYING)
def unpack_kernel(
    tiles, num_tiles, block_ids, records, record_bytes, digests,
    AS_IS: tl.constexpr, F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, ALIGN: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    record, tile = tl.program_id(0) // num_tiles, tiles + TILE * (tl.program_id(0) % num_tiles)
    kind, count, offset = tl.load(tile + 5), tl.load(tile + 4), tl.load(tile + 3)
    block = tl.load(block_ids + record)
    kept = tl.where(block >= 0, count, 0)  # skip the rows of a record with a negative block id
    target = tl.load(tile) + block * tl.load(tile + 1) + tl.load(tile + 2)
    source = records.to(tl.int64) + record.to(tl.int64) * record_bytes
    if AS_IS:
        if kind == COPIED:
            words, wanted = tl.multiple_of(count, ALIGN // 8), tl.multiple_of(kept, ALIGN // 8)
            add(digests, record, copy(source + offset, target, words, wanted, offset // 8, ALIGN, WORDS))
    if F32 or F16 or BF16:
        if kind != COPIED:
            width, scales_at = tl.multiple_of(tl.load(tile + 6), 8), tl.load(tile + 7)
            row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
            at = row[:, None] * width + column[None, :]
            mask = (row[:, None] < count) & (column[None, :] < width)
            codes = tl.load(aligned(source + offset, tl.uint8, 8) + at, mask=mask, other=0)
            scales = tl.load(aligned(source + scales_at, tl.float32, 8) + row, mask=row < count, other=0.0)
            values = _decode(codes, FP8, NATIVE) * scales[:, None]
            _store_elements(
                target, at, values, mask & (row[:, None] < kept), kind, ALIGN, NATIVE, F32, F16, BF16
            )
            total = _digest_codes(codes.to(tl.int32), count, offset // 8, width, ROWS, WIDTH)
            add(digests, record, total + digest_scales(scales, count, scales_at // 8, ROWS))


def cut(table: KVTable) -> Cut:
    """Return the tiles of a table's quantised rows, for `unpack_kernel`."""
    width = triton.next_power_of_2(max(WORD, int(table.columns[:, TableColumn.WIDTH].max())))
    rows = max(2, TILE_ELEMENTS // width)
    return Cut(rows, WARPS, {"ROWS": rows, "WIDTH": width})
