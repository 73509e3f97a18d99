"""The GPU form, in Triton: one launch packs, one unpacks, whatever layers the table has.

A program handles one tile of one layer of one block. Tiles are laid out once for each cache (`_tiles`), so
that a program finds its place in a line of 64 bytes. Nothing here waits for the device or depends on the
data: a launch can be captured in a CUDA graph.
"""

# ruff: noqa: PLR0917, SIM102, SIM108 (device code: a compile-time `if` stands alone)

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from baton.kernels.kv_pack.table import LARGEST, SCALE_BYTES, TINY, WORD, KVTable, PartKind, TableColumn

TILE_WORDS = 2048  # 16 KiB: 64 bytes for each thread
TILE_ELEMENTS = 10240  # so that a tile has the 16 tokens of a block of MLA's
PIECE = 32  # elements of a row that lie side by side in a piece, but for very wide rows
MOST_PIECES = 16
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
def _mix(words, first, places):
    """Mix words (README.md, "The digest"): a bijection of the word for each position. uint64.

    They stand at `first`, one number, and `places` (int32, not negative) behind it: so the position costs a
    multiplication by 32 bits.
    """
    salts = (first + 1).to(tl.uint64) * _GOLDEN + places.to(tl.uint32).to(tl.uint64) * _GOLDEN
    x = (words ^ salts) * _FIRST
    x = (x ^ (x >> 32)) * _SECOND
    return x ^ (x >> 32)


@triton.jit
def _add(digests, record, total):
    tl.atomic_add(digests + record, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def _digest_codes(codes, mask, first, place, ROWS: tl.constexpr, FOURS: tl.constexpr):
    """Return the terms of codes' words: [ROWS, FOURS // 2]. place: each code's, behind the word `first`."""
    low, high = _halves(codes, ROWS, FOURS)
    words = _join(low, high)
    places, _ = _halves(place, ROWS, FOURS)
    mixed = _mix(words, first, places >> 1)
    if mask is not None:
        valid, _ = _halves(mask.to(tl.int32), ROWS, FOURS)
        mixed = tl.where(valid != 0, mixed, 0)
    return mixed


@triton.jit
def _halves(pairs, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the even and the odd columns: neighbours are one thread's."""
    return tl.split(tl.reshape(pairs, [ROWS, SIZE // 2, 2]))


@triton.jit
def _digest_scales(scales, valid, first, ROWS: tl.constexpr):
    """Digest scales: [ROWS] float32; an even number of them is valid."""
    bits = tl.reshape(scales.to(tl.uint32, bitcast=True).to(tl.uint64), [ROWS // 2, 2])
    words = tl.sum(bits << (tl.arange(0, 2)[None, :] * 32).to(tl.uint64), axis=1)
    pair = tl.arange(0, ROWS // 2)
    return tl.sum(tl.where(2 * pair < valid, _mix(words, first, pair), 0))


@triton.jit
def _load(pointers, mask):
    if mask is None:
        loaded = tl.load(pointers, eviction_policy="evict_first")
    else:
        loaded = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    return loaded


@triton.jit
def _from_bits(bits, dtype: tl.constexpr):
    """Turn the low 16 bits into float32."""
    return bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _float32(bits):
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _load_fours(
    address, at, mask, kind, ALIGN: tl.constexpr, F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr
):  # fmt: skip
    """Load four neighbours for each of `at`, as float32. Only the dtypes of the table are compiled in."""
    a, b = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
    c, d = a, b
    if F16 or BF16:
        if F32:
            four = tl.zeros(at.shape, tl.uint64)
            if kind != _FLOAT32:
                four = _load(_at(address, tl.uint64, ALIGN) + at, mask)
        else:
            four = _load(_at(address, tl.uint64, ALIGN) + at, mask)
        low, high = four.to(tl.uint32), (four >> 32).to(tl.uint32)
        if BF16:
            a, b = _float32(low << 16), _float32(low & 0xFFFF0000)
            c, d = _float32(high << 16), _float32(high & 0xFFFF0000)
        if F16:
            is_half = True
            if BF16:
                is_half = kind == _FLOAT16
            a = tl.where(is_half, _from_bits(low, tl.float16), a)
            b = tl.where(is_half, _from_bits(low >> 16, tl.float16), b)
            c = tl.where(is_half, _from_bits(high, tl.float16), c)
            d = tl.where(is_half, _from_bits(high >> 16, tl.float16), d)
    if F32:
        if kind == _FLOAT32:
            left = _at(address, tl.uint64, ALIGN) + 2 * at
            low, high = _load(left, mask), _load(left + 1, mask)
            a, b, c, d = _float32(low), _float32(low >> 32), _float32(high), _float32(high >> 32)
    return a, b, c, d


@triton.jit
def _magnitude(a, b, c, d):
    """Return the largest magnitude of each four, as bits: NaN is above all, so that it is not lost."""
    a, b = a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    c, d = c.to(tl.int32, bitcast=True) & 0x7FFFFFFF, d.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def _bfloat16(values):
    """Round to the nearest, to even on ties; the interpreter would truncate. Return the bits: uint32."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def _bfloat16s(low, high, NATIVE: tl.constexpr):
    """Round two, and return both in a uint32."""
    if NATIVE:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )
    else:
        pair = _bfloat16(low) | (_bfloat16(high) << 16)
    return pair


@triton.jit
def _float16(values):
    return values.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def _join(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _store_fours(
    address, at, a, b, c, d, mask, kind, ALIGN: tl.constexpr, NATIVE: tl.constexpr,
    F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Store four neighbours for each of `at`, in a layer's dtype."""
    words = _at(address, tl.uint64, ALIGN)
    if F32:
        if kind == _FLOAT32:
            low = _join(a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True))
            high = _join(c.to(tl.uint32, bitcast=True), d.to(tl.uint32, bitcast=True))
            tl.store(words + 2 * at, low, mask=mask)
            tl.store(words + 2 * at + 1, high, mask=mask)
    if F16:
        if kind == _FLOAT16:
            low, high = _float16(a) | (_float16(b) << 16), _float16(c) | (_float16(d) << 16)
            tl.store(words + at, _join(low, high), mask=mask)
    if BF16:
        if kind == _BFLOAT16:
            tl.store(words + at, _join(_bfloat16s(a, b, NATIVE), _bfloat16s(c, d, NATIVE)), mask=mask)


@triton.jit
def _encode(scaled, FP8: tl.constexpr):
    """Return the codes of values within a format's range: int32 of 0 to 255."""
    if not FP8:
        return (scaled + _INTEGERS).to(tl.int32, bitcast=True) & 0xFF
    bits = scaled.to(tl.int32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    normal = ((rest + 0x7FFFF + ((rest >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2**-9
    code = tl.minimum(tl.where(rest < 0x3C800000, small, normal), 0x7E)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _encode_fours(a, b, c, d, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """Return the codes of four neighbours, in a uint32."""
    if not NATIVE:
        low = _encode(a, FP8) | (_encode(b, FP8) << 8)
        high = _encode(c, FP8) | (_encode(d, FP8) << 8)
        return (low | (high << 16)).to(tl.uint32, bitcast=True)
    if FP8:
        return tl.inline_asm_elementwise(
            "{.reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 y, $4, $3; mov.b32 $0, {x, y};}",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{.reg .b32 x, y; prmt.b32 x, $1, $2, 0x0040; prmt.b32 y, $3, $4, 0x0040; "
        "prmt.b32 $0, x, y, 0x5410;}",
        "=r,r,r,r,r",
        [
            (a + _INTEGERS).to(tl.uint32, bitcast=True),
            (b + _INTEGERS).to(tl.uint32, bitcast=True),
            (c + _INTEGERS).to(tl.uint32, bitcast=True),
            (d + _INTEGERS).to(tl.uint32, bitcast=True),
        ],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _decode(codes, FP8: tl.constexpr):
    """Return codes, uint32 of 0 to 255, as float32."""
    if not FP8:  # 2**23 and the code are one number; it is 128 too large
        return _float32((codes ^ 0x80) | 0x4B000000) - 8388736.0
    wide = codes.to(tl.int32)
    rest = wide & 0x7F
    small = rest.to(tl.float32) * 0.001953125  # 2**-9
    normal = ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rest < 8, small, normal)
    return tl.where(wide < 128, value, -value)


@triton.jit
def _decode_fours(codes, FP8: tl.constexpr, NATIVE: tl.constexpr):
    """Return the four values in each uint32, as float32."""
    if FP8 and NATIVE:
        low, high = tl.inline_asm_elementwise(
            "{.reg .b16 x, y; mov.b32 {x, y}, $2; cvt.rn.f16x2.e4m3x2 $0, x; cvt.rn.f16x2.e4m3x2 $1, y;}",
            "=r,=r,r", [codes], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
        return (
            _from_bits(low, tl.float16), _from_bits(low >> 16, tl.float16),
            _from_bits(high, tl.float16), _from_bits(high >> 16, tl.float16),
        )  # fmt: skip
    return (
        _decode(codes & 0xFF, FP8), _decode((codes >> 8) & 0xFF, FP8),
        _decode((codes >> 16) & 0xFF, FP8), _decode(codes >> 24, FP8),
    )  # fmt: skip


@triton.jit
def _places(piece, fours, ROWS: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, FULL: tl.constexpr):
    """Return the places of [ROWS, SIZE] fours: one piece of each row."""
    row, column = tl.arange(0, ROWS)[:, None], piece * SIZE + tl.arange(0, SIZE)[None, :]
    if FULL:
        places = row * (PIECES * SIZE) + column
    else:
        places = row * tl.multiple_of(fours, 2) + column
    return places


@triton.jit
def _exist(piece, count, fours, ROWS: tl.constexpr, SIZE: tl.constexpr):
    return (tl.arange(0, ROWS)[:, None] < count) & (piece * SIZE + tl.arange(0, SIZE)[None, :] < fours)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def _pack(
    tiles, num_tiles, block_ids, records, record_bytes, digests,
    AS_IS: tl.constexpr, F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, ALIGN: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, FULL: tl.constexpr,
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
            _add(digests, record, tl.sum(tl.where(at < count, _mix(words, offset // 8, at), 0)))
    if F32 or F16 or BF16:
        if kind != _AS_IS:
            fours, scales_at = tl.load(tile + 6).to(tl.int32) // 4, tl.load(tile + 7)
            row, mask, loaded = tl.arange(0, ROWS), None, ()
            peaks = tl.zeros([ROWS, SIZE], tl.int32)
            for piece in tl.static_range(PIECES):
                if not FULL:
                    mask = _exist(piece, count, fours, ROWS, SIZE)
                place = _places(piece, fours, ROWS, SIZE, PIECES, FULL)
                four = _load_fours(source, place, mask, kind, ALIGN, F32, F16, BF16)
                peaks = tl.maximum(peaks, _magnitude(four[0], four[1], four[2], four[3]))
                loaded = loaded + four
            most = tl.max(peaks, axis=1).to(tl.float32, bitcast=True)
            most = tl.where(most < _TINY, _TINY, most)
            largest = tl.full([ROWS], _FP8_LARGEST if FP8 else _INT8_LARGEST, tl.float32)
            factors, scales = tl.div_rn(largest, most)[:, None], tl.div_rn(most, largest)
            total = tl.zeros([ROWS, SIZE // 2], tl.uint64)
            for piece in tl.static_range(PIECES):
                if not FULL:
                    mask = _exist(piece, count, fours, ROWS, SIZE)
                place = _places(piece, fours, ROWS, SIZE, PIECES, FULL)
                codes = _encode_fours(
                    loaded[4 * piece] * factors, loaded[4 * piece + 1] * factors,
                    loaded[4 * piece + 2] * factors, loaded[4 * piece + 3] * factors, FP8, NATIVE,
                )  # fmt: skip
                tl.store(_at(target + offset, tl.uint32, 8) + place, codes, mask=mask)
                total += _digest_codes(codes, mask, offset // 8, place, ROWS, SIZE)
            tl.store(_at(target + scales_at, tl.float32, 8) + row, scales, mask=row < count)
            _add(digests, record, tl.sum(total) + _digest_scales(scales, count, scales_at // 8, ROWS))


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VARYING)
def _unpack(
    tiles, num_tiles, block_ids, records, record_bytes, digests,
    AS_IS: tl.constexpr, F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, ALIGN: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, FULL: tl.constexpr,
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
            _add(digests, record, tl.sum(tl.where(at < count, _mix(words, offset // 8, at), 0)))
    if F32 or F16 or BF16:
        if kind != _AS_IS:
            fours, scales_at = tl.load(tile + 6).to(tl.int32) // 4, tl.load(tile + 7)
            row, mask = tl.arange(0, ROWS), None
            wanted = row[:, None] < kept
            scales = tl.load(_at(source + scales_at, tl.float32, 8) + row, mask=row < count, other=0.0)
            factors = scales[:, None]
            total = tl.zeros([ROWS, SIZE // 2], tl.uint64)
            for piece in tl.static_range(PIECES):
                if not FULL:
                    mask = _exist(piece, count, fours, ROWS, SIZE)
                    wanted = mask & (row[:, None] < kept)
                place = _places(piece, fours, ROWS, SIZE, PIECES, FULL)
                codes = _load(_at(source + offset, tl.uint32, 8) + place, mask)
                a, b, c, d = _decode_fours(codes, FP8, NATIVE)
                _store_fours(
                    target, place, a * factors, b * factors, c * factors, d * factors, wanted, kind,
                    ALIGN, NATIVE, F32, F16, BF16,
                )  # fmt: skip
                total += _digest_codes(codes, mask, offset // 8, place, ROWS, SIZE)
            _add(digests, record, tl.sum(total) + _digest_scales(scales, count, scales_at // 8, ROWS))


@dataclass(frozen=True)
class _Launch:
    """The arguments that all launches over a table share."""

    tiles: torch.Tensor  # [num_tiles, 8] int64, on the device
    constants: dict[str, Any]
    warps: int


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
        num_warps=launch.warps,
        enable_fp_fusion=False,  # a fused multiply-add would round codes otherwise than the CPU does
    )


def _prepare(table: KVTable) -> _Launch:
    columns = table.columns
    kinds = Counter(int(kind) for kind in columns[:, TableColumn.KIND])
    size, pieces = _pieces([int(width) for width in columns[:, TableColumn.WIDTH] if width])
    rows = _rows_a_tile(size * pieces, int(columns[:, TableColumn.ROWS].max()))
    places = columns[:, [TableColumn.BASE, TableColumn.STRIDE, TableColumn.SIZE, TableColumn.OFFSET]]
    tiles = [tile for row in columns.tolist() for tile in _tiles(row, rows)]
    # Nothing has to be masked: all rows fill their pieces, and all tiles have as many.
    full = {tile[4:7] for tile in tiles if tile[5]} == {(rows, max(kinds), size * pieces)}
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
        "SIZE": size // 4,
        "PIECES": pieces,
        "FULL": full,
    }
    # A thread has 8 elements of a piece: 16 bytes of a layer.
    warps = max(1, min(_WARPS, rows * size // 8 // 32)) if pieces and any(kinds) else _WARPS
    return _Launch(torch.tensor(tiles, dtype=torch.int64, device=table.device), constants, warps)


def _pieces(widths: list[int]) -> tuple[int, int]:
    """Return the elements of a piece, a power of two, and the pieces in which a row is held: 576 = 9 x 64.

    A thread has as much of each piece, and so more of one row; nothing is lost to a power of two.
    """
    most = max(widths, default=WORD)
    common = math.gcd(*widths, PIECE) if widths else WORD
    size = max(common, triton.next_power_of_2(-(-most // MOST_PIECES)))
    return size, -(-most // size)


def _rows_a_tile(width: int, most: int) -> int:
    """Return a power of two, at least 2: rows of this width in a tile, not far more than a block's `most`."""
    rows = 1 << (max(2, TILE_ELEMENTS // width).bit_length() - 1)
    return max(2, min(rows, 1 << max(0, most - 1).bit_length()))


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
