"""Device code shared by packing and unpacking: pointers, the digest, and unquantised parts."""

# ruff: noqa: PLR0917 (device code)

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.kv_pack.table import LARGEST, TINY, PartKind

# Numbers per tile: base, stride, offset in block, offset in record, words or rows, kind, width, offset of
# scales.
TILE = tl.constexpr(8)

# Not specialised, so that one compiled kernel serves every chunk; ALIGN states the pointers' alignment.
VARYING = ["num_tiles", "block_ids", "records", "record_bytes", "digests"]

COPIED = tl.constexpr(int(PartKind.AS_IS))
FLOAT32 = tl.constexpr(int(PartKind.FLOAT32))
FLOAT16 = tl.constexpr(int(PartKind.FLOAT16))
BFLOAT16 = tl.constexpr(int(PartKind.BFLOAT16))
SMALLEST = tl.constexpr(TINY)
FP8_LARGEST = tl.constexpr(LARGEST["fp8_e4m3"])
INT8_LARGEST = tl.constexpr(LARGEST["int8"])

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def aligned(address, dtype: tl.constexpr, ALIGN: tl.constexpr):
    """Turn an address into a pointer of known alignment, so that loads cover several elements."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), ALIGN)


@triton.jit
def salts(positions):
    """Return the uint64 salts of the words at these positions (README.md, "The digest")."""
    return (positions + 1).to(tl.uint64) * _GOLDEN


@triton.jit
def salts_behind(first, places):
    """Return `salts(first + places)` for non-negative int32 places, with one 32-bit multiplication each."""
    return salts(first) + places.to(tl.uint32).to(tl.uint64) * _GOLDEN


@triton.jit
def mix(words, salt):
    """Mix uint64 words; the mapping is a bijection for each salt."""
    x = (words ^ salt) * _FIRST
    x = (x ^ (x >> 32)) * _SECOND
    return x ^ (x >> 32)


@triton.jit
def add(digests, record, total):
    tl.atomic_add(digests + record, total.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def digest_scales(scales, valid, first, ROWS: tl.constexpr):
    """Digest the first `valid` of [ROWS] float32 scales; `valid` is even."""
    bits = tl.reshape(scales.to(tl.uint32, bitcast=True).to(tl.uint64), [ROWS // 2, 2])
    words = tl.sum(bits << (tl.arange(0, 2)[None, :] * 32).to(tl.uint64), axis=1)
    pair = tl.arange(0, ROWS // 2)
    return tl.sum(tl.where(2 * pair < valid, mix(words, salts_behind(first, pair)), 0))


@triton.jit
def copy(source, target, count, kept, first, ALIGN: tl.constexpr, WORDS: tl.constexpr):
    """Copy the first `kept` of `count` words, and digest all of them. first: their offset in the record.

    Callers must mark the counts with tl.multiple_of: on a function's own argument it has no effect.
    """
    at = tl.arange(0, WORDS)
    left, right = aligned(source, tl.uint64, ALIGN), aligned(target, tl.uint64, ALIGN)
    words = tl.load(left + at, mask=at < count, other=0, eviction_policy="evict_first")
    tl.store(right + at, words, mask=at < kept)
    return tl.sum(tl.where(at < count, mix(words, salts_behind(first, at)), 0))
