"""The packing kernel. It holds rows in pieces and processes elements four at a time, as words."""

# ruff: noqa: PLR0917, SIM102, SIM108 (device code: a compile-time `if` stands alone)

from __future__ import annotations

import math

import triton
import triton.language as tl

from baton.kernels.kv_pack.gpu.shared import (
    COPIED,
    FLOAT16,
    FLOAT32,
    FP8_LARGEST,
    INT8_LARGEST,
    SMALLEST,
    TILE,
    VARYING,
    add,
    aligned,
    copy,
    digest_scales,
    mix,
    salts_behind,
)
from baton.kernels.kv_pack.gpu.tiles import WARPS, Cut
from baton.kernels.kv_pack.table import WORD, KVTable, TableColumn

TILE_ELEMENTS = 10240  # a tile holds the 16 tokens of an MLA block
PIECE = 32  # adjacent elements of a row in a piece; more if rows are very wide
MOST_PIECES = 16
_INTEGERS = tl.constexpr(1.5 * 2**23)  # adding it rounds a float32 to an integer; see cpu.py


@triton.jit
def _load(pointers, mask):
    if mask is None:
        loaded = tl.load(pointers, eviction_policy="evict_first")
    else:
        loaded = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    return loaded


@triton.jit
def _from_bits(bits, dtype: tl.constexpr):
    """Convert the low 16 bits to float32."""
    return bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _float32(bits):
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _load_fours(
    address, at, mask, kind, ALIGN: tl.constexpr, F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr
):  # fmt: skip
    """Load four adjacent elements per entry of `at`, as float32. Only the table's dtypes are compiled in."""
    a, b = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
    c, d = a, b
    if F16 or BF16:
        if F32:
            four = tl.zeros(at.shape, tl.uint64)
            if kind != FLOAT32:
                four = _load(aligned(address, tl.uint64, ALIGN) + at, mask)
        else:
            four = _load(aligned(address, tl.uint64, ALIGN) + at, mask)
        low, high = four.to(tl.uint32), (four >> 32).to(tl.uint32)
        if BF16:
            a, b = _float32(low << 16), _float32(low & 0xFFFF0000)
            c, d = _float32(high << 16), _float32(high & 0xFFFF0000)
        if F16:
            is_half = True
            if BF16:
                is_half = kind == FLOAT16
            a = tl.where(is_half, _from_bits(low, tl.float16), a)
            b = tl.where(is_half, _from_bits(low >> 16, tl.float16), b)
            c = tl.where(is_half, _from_bits(high, tl.float16), c)
            d = tl.where(is_half, _from_bits(high >> 16, tl.float16), d)
    if F32:
        if kind == FLOAT32:
            left = aligned(address, tl.uint64, ALIGN) + 2 * at
            two, next_two = _load(left, mask), _load(left + 1, mask)
            a, b, c, d = _float32(two), _float32(two >> 32), _float32(next_two), _float32(next_two >> 32)
    return a, b, c, d


@triton.jit
def _magnitude(a, b, c, d):
    """Return the largest magnitude of each group of four, as bits, so that NaN compares above all others."""
    a, b = a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    c, d = c.to(tl.int32, bitcast=True) & 0x7FFFFFFF, d.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def _encode(scaled, FP8: tl.constexpr):
    """Return the codes, int32 of 0 to 255, of values within a format's range."""
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
    """Return the codes of four adjacent elements, packed into a uint32."""
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
def _join(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _halves(pairs, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the even and the odd columns; one thread holds adjacent columns."""
    return tl.split(tl.reshape(pairs, [ROWS, SIZE // 2, 2]))


@triton.jit
def _digest_codes(codes, mask, first, place, ROWS: tl.constexpr, FOURS: tl.constexpr):
    """Return the digest terms of the codes' words, [ROWS, FOURS // 2]. place: position from word `first`."""
    low, high = _halves(codes, ROWS, FOURS)
    words = _join(low, high)
    places, _ = _halves(place, ROWS, FOURS)
    mixed = mix(words, salts_behind(first, places >> 1))
    if mask is not None:
        valid, _ = _halves(mask.to(tl.int32), ROWS, FOURS)
        mixed = tl.where(valid != 0, mixed, 0)
    return mixed


@triton.jit
def _places(piece, fours, ROWS: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, FULL: tl.constexpr):
    """Return the positions of [ROWS, SIZE] groups of four: one piece of each row."""
    row, column = tl.arange(0, ROWS)[:, None], piece * SIZE + tl.arange(0, SIZE)[None, :]
    if FULL:
        places = row * (PIECES * SIZE) + column
    else:
        places = row * tl.multiple_of(fours, 2) + column
    return places


@triton.jit
def _exist(piece, count, fours, ROWS: tl.constexpr, SIZE: tl.constexpr):
    return (tl.arange(0, ROWS)[:, None] < count) & (piece * SIZE + tl.arange(0, SIZE)[None, :] < fours)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=VARYING)
def pack_kernel(
    tiles, num_tiles, block_ids, records, record_bytes, digests,
    AS_IS: tl.constexpr, F32: tl.constexpr, F16: tl.constexpr, BF16: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, ALIGN: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    record, tile = tl.program_id(0) // num_tiles, tiles + TILE * (tl.program_id(0) % num_tiles)
    kind, count, offset = tl.load(tile + 5), tl.load(tile + 4), tl.load(tile + 3)
    block = tl.load(block_ids + record)
    source = tl.load(tile) + block * tl.load(tile + 1) + tl.load(tile + 2)
    target = records.to(tl.int64) + record.to(tl.int64) * record_bytes
    if AS_IS:
        if kind == COPIED:
            words = tl.multiple_of(count, ALIGN // 8)
            add(digests, record, copy(source, target + offset, words, words, offset // 8, ALIGN, WORDS))
    if F32 or F16 or BF16:
        if kind != COPIED:
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
            most = tl.where(most < SMALLEST, SMALLEST, most)
            largest = tl.full([ROWS], FP8_LARGEST if FP8 else INT8_LARGEST, tl.float32)
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
                tl.store(aligned(target + offset, tl.uint32, 8) + place, codes, mask=mask)
                total += _digest_codes(codes, mask, offset // 8, place, ROWS, SIZE)
            tl.store(aligned(target + scales_at, tl.float32, 8) + row, scales, mask=row < count)
            add(digests, record, tl.sum(total) + digest_scales(scales, count, scales_at // 8, ROWS))


def cut(table: KVTable) -> Cut:
    """Return the tiles of a table's quantised rows, for `pack_kernel`."""
    rows_of, widths = (table.columns[:, column].tolist() for column in (TableColumn.ROWS, TableColumn.WIDTH))
    size, pieces = _pieces([width for width in widths if width])
    rows = _rows_a_tile(size * pieces, max(rows_of))
    # True if no masks are needed: all rows fill their pieces, and all tiles have the same number of rows.
    full = {(width, count % rows) for width, count in zip(widths, rows_of, strict=True) if width} == {
        (size * pieces, 0)
    }
    # Each thread takes 8 elements of a piece, 16 bytes of a layer.
    warps = max(1, min(WARPS, rows * size // 8 // 32)) if any(widths) else WARPS
    return Cut(rows, warps, {"ROWS": rows, "SIZE": size // 4, "PIECES": pieces, "FULL": full})


def _pieces(widths: list[int]) -> tuple[int, int]:
    """Return the elements per piece, a power of two, and the pieces per row: 576 = 9 x 64.

    A thread holds an equal share of each piece, so it holds more elements of one row, and no row is padded to
    a power of two.
    """
    most = max(widths, default=WORD)
    common = math.gcd(*widths, PIECE) if widths else WORD
    size = max(common, triton.next_power_of_2(-(-most // MOST_PIECES)))
    return size, -(-most // size)


def _rows_a_tile(width: int, most: int) -> int:
    """Return the rows of this width per tile, a power of two of at least 2. most: rows per block."""
    rows = 1 << (max(2, TILE_ELEMENTS // width).bit_length() - 1)
    return max(2, min(rows, 1 << max(0, most - 1).bit_length()))
