"""The CPU form, compiled by numba on first import (3 s, once per machine).

It runs on the calling thread and without the GIL. torch would start a second team of OpenMP threads on the
cores that an engine is pinned to, and would need a pass over memory for every operation. Here the digest is
computed while the data is in the cache, so it costs a copy no extra time.

Quantised parts go through a float32 buffer, with one simple loop per operation, which LLVM vectorises.
"""

# ruff: noqa: PLR0917 (these functions are inlined into their callers)

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[import-untyped]
from numba.core import cgutils, types  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

from baton.kernels.compiled import compiled
from baton.kernels.kv_pack.table import LARGEST, TINY, PartKind, TableColumn

_BASE, _STRIDE, _SIZE, _OFFSET = (
    int(c) for c in (TableColumn.BASE, TableColumn.STRIDE, TableColumn.SIZE, TableColumn.OFFSET)
)
_KIND, _ROWS, _WIDTH, _SCALES = (
    int(c) for c in (TableColumn.KIND, TableColumn.ROWS, TableColumn.WIDTH, TableColumn.SCALES)
)
_AS_IS, _FLOAT32, _FLOAT16 = int(PartKind.AS_IS), int(PartKind.FLOAT32), int(PartKind.FLOAT16)

_GOLDEN, _FIRST, _SECOND = (
    np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_HALF, _ONE = np.uint64(32), np.uint64(1)

_FP8_LARGEST, _INT8_LARGEST = np.float32(LARGEST["fp8_e4m3"]), np.float32(LARGEST["int8"])
_TINY_BITS = np.float32(TINY).view(np.uint32)
_MAGNITUDE, _INFINITY = np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)
# Adding this to a float32 rounds it to an integer, ties to even: the sum's last bit is worth 1, and its
# lowest bits are the integer's two's complement.
_INTEGERS = np.float32(1.5 * 2**23)
# Likewise for the subnormal steps: 2**-9 for e4m3 below 2**-6, and 2**-24 for float16 below 2**-14.
_FP8_STEPS, _FP8_STEPS_BITS = np.float32(2.0**14), np.float32(2.0**14).view(np.uint32)
_FP16_STEPS, _FP16_STEPS_BITS = np.float32(0.5), np.float32(0.5).view(np.uint32)
_FP8_NORMAL, _FP16_NORMAL = np.float32(2.0**-6).view(np.uint32), np.float32(2.0**-14).view(np.uint32)
_FP16_OVERFLOW = np.float32(65520.0).view(np.uint32)


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing: Any, address: Any) -> Any:
    """Turn an address into a pointer. One compiled function then serves every array, aligned or not."""
    del typing, address

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _bits(typing: Any, value: Any) -> Any:
    del typing, value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _float(typing: Any, bits: Any) -> Any:
    del typing, bits

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _move(typing: Any, source: Any, target: Any, size: Any) -> Any:
    """Call the C library's memcpy on addresses. For blocks of 32 KiB it is a fifth faster than a loop."""
    del typing, source, target, size

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        pointer = context.get_value_type(types.voidptr)
        source, target = (builder.inttoptr(one, pointer) for one in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@compiled("uint64(int64, int64, uint64)")
def _digest(address: Any, words: Any, first: Any) -> Any:
    """Digest `words` words, starting with word `first` of the record."""
    data = carray(_pointer(address), words, np.uint64)
    total = np.uint64(0)
    for i in range(words):
        x = (data[i] ^ ((first + np.uint64(i) + _ONE) * _GOLDEN)) * _FIRST
        x = (x ^ (x >> _HALF)) * _SECOND
        total += x ^ (x >> _HALF)
    return total


@compiled("uint64(int64, int64, int64, uint64)")
def _copy(source: Any, target: Any, words: Any, first: Any) -> Any:
    """Copy `words` words and return their digest."""
    left, right = carray(_pointer(source), words, np.uint64), carray(_pointer(target), words, np.uint64)
    total = np.uint64(0)
    for i in range(words):
        word = left[i]
        right[i] = word
        x = (word ^ ((first + np.uint64(i) + _ONE) * _GOLDEN)) * _FIRST
        x = (x ^ (x >> _HALF)) * _SECOND
        total += x ^ (x >> _HALF)
    return total


@compiled()
def _load(kind: Any, source: Any, count: Any, bits: Any) -> None:
    """Convert elements to float32, as raw bits."""
    if kind == _FLOAT32:
        words = carray(_pointer(source), count, np.uint32)
        for i in range(count):
            bits[i] = words[i]
        return
    halves = carray(_pointer(source), count, np.uint16)
    if kind == _FLOAT16:
        for i in range(count):
            half = np.uint32(halves[i])
            sign, rest = (half & np.uint32(0x8000)) << np.uint32(16), half & np.uint32(0x7FFF)
            shifted = rest << np.uint32(13)
            normal = shifted + np.uint32(112 << 23)
            infinite = shifted + np.uint32(224 << 23)
            small = _bits(np.float32(rest) * np.float32(2.0**-24))
            value = small if rest < np.uint32(0x400) else normal
            bits[i] = sign | (infinite if rest >= np.uint32(0x7C00) else value)
    else:
        for i in range(count):
            bits[i] = np.uint32(halves[i]) << np.uint32(16)


@compiled()
def _store(kind: Any, bits: Any, count: Any, target: Any) -> None:
    """Convert raw float32 bits to elements, rounding to the nearest, ties to even."""
    if kind == _FLOAT32:
        words = carray(_pointer(target), count, np.uint32)
        for i in range(count):
            words[i] = bits[i]
        return
    halves = carray(_pointer(target), count, np.uint16)
    if kind == _FLOAT16:
        for i in range(count):
            sign, rest = (bits[i] >> np.uint32(16)) & np.uint32(0x8000), bits[i] & _MAGNITUDE
            odd = (rest >> np.uint32(13)) & np.uint32(1)
            normal = ((rest + np.uint32(0xFFF) + odd) >> np.uint32(13)) - np.uint32(112 << 10)
            small = _bits(_float(rest) + _FP16_STEPS) - _FP16_STEPS_BITS
            value = small if rest < _FP16_NORMAL else normal
            value = np.uint32(0x7C00) if rest >= _FP16_OVERFLOW else value
            halves[i] = np.uint16(sign | (np.uint32(0x7E00) if rest > _INFINITY else value))
    else:
        for i in range(count):
            odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
            rounded = (bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            nan = (bits[i] & _MAGNITUDE) > _INFINITY
            halves[i] = np.uint16(np.uint32(0x7FC0) if nan else rounded)


@compiled()
def _scale(largest: Any, rows: Any, width: Any, bits: Any, scales: Any) -> None:
    """Scale each row of float32 to the format's range, in place; store the scales that restore it."""
    floats = bits.view(np.float32)
    for row in range(rows):
        start, stop = row * width, (row + 1) * width
        here, values = bits[start:stop], floats[start:stop]  # LLVM vectorises loops that begin at 0
        most = _TINY_BITS
        for i in range(width):
            size = np.uint32(here[i] & _MAGNITUDE)
            # NaN's bits compare above all others. `max` would use 64 bits, which is slower.
            most = size if size > most else most
        factor = largest / _float(most)
        scales[row] = _float(most) / largest
        for i in range(width):
            values[i] *= factor


@compiled()
def _encode(fp8: Any, count: Any, bits: Any, codes: Any) -> None:
    """Round to codes. bits: float32 values within the format's range; overwritten."""
    if fp8:
        for i in range(count):
            sign, rest = (bits[i] >> np.uint32(24)) & np.uint32(0x80), np.uint32(bits[i] & _MAGNITUDE)
            odd = (rest >> np.uint32(20)) & np.uint32(1)
            normal = (np.uint32(rest + np.uint32(0x7_FFFF) + odd) >> np.uint32(20)) - np.uint32(120 << 3)
            small = _bits(_float(rest) + _FP8_STEPS) - _FP8_STEPS_BITS
            value = np.uint32(small if rest < _FP8_NORMAL else normal)
            codes[i] = np.uint8(sign | (value if value < np.uint32(0x7E) else np.uint32(0x7E)))
    else:
        values = bits.view(np.float32)
        for i in range(count):
            codes[i] = np.uint8(_bits(values[i] + _INTEGERS))


@compiled()
def _decode(fp8: Any, codes: Any, rows: Any, width: Any, scales: Any, values: Any) -> None:
    for row in range(rows):
        scale, start, stop = scales[row], row * width, (row + 1) * width
        codes_here, here = codes[start:stop], values[start:stop]
        if fp8:
            for i in range(width):
                code = np.uint32(codes_here[i])
                rest = np.uint32(code & np.uint32(0x7F))
                normal = _float(np.uint32((rest << np.uint32(20)) + np.uint32(120 << 23)))
                small = np.float32(np.int32(rest)) * np.float32(2.0**-9)
                value = small if rest < np.uint32(8) else normal
                here[i] = (value if code < np.uint32(0x80) else -value) * scale
        else:
            for i in range(width):
                here[i] = np.float32(np.int8(codes_here[i])) * scale


@compiled("void(int64[:, ::1], int64, int64[::1], int64, int64, uint64[::1])")
def pack(table: Any, fp8: Any, block_ids: Any, records: Any, record_bytes: Any, digests: Any) -> None:
    """Gather blocks. table: `KVTable.columns`; records: the first record's address; digests: overwritten."""
    digests[:] = np.uint64(0)
    for layer in range(table.shape[0]):
        base, stride, size = table[layer, _BASE], table[layer, _STRIDE], table[layer, _SIZE]
        offset, kind = table[layer, _OFFSET], table[layer, _KIND]
        rows, width = table[layer, _ROWS], table[layer, _WIDTH]
        count, first = rows * width, np.uint64(offset // 8)
        bits = np.empty(count, np.uint32)
        for i in range(block_ids.shape[0]):
            source, target = base + block_ids[i] * stride, records + i * record_bytes + offset
            if kind == _AS_IS:
                digests[i] += _copy(source, target, size // 8, first)
                continue
            _load(kind, source, count, bits)
            largest = _FP8_LARGEST if fp8 else _INT8_LARGEST
            _scale(largest, rows, width, bits, carray(_pointer(target + count), rows, np.float32))
            _encode(fp8, count, bits, carray(_pointer(target), count, np.uint8))
            digests[i] += _digest(target, (count + 4 * rows) // 8, first)


@compiled("void(int64[:, ::1], int64, int64, int64, int64[::1])")
def unpack(table: Any, fp8: Any, records: Any, record_bytes: Any, block_ids: Any) -> None:
    """Scatter records to blocks; skip negative block ids."""
    for layer in range(table.shape[0]):
        base, stride, size = table[layer, _BASE], table[layer, _STRIDE], table[layer, _SIZE]
        offset, kind = table[layer, _OFFSET], table[layer, _KIND]
        rows, width = table[layer, _ROWS], table[layer, _WIDTH]
        count, scales_at = rows * width, table[layer, _SCALES]
        bits = np.empty(count, np.uint32)
        for i in range(block_ids.shape[0]):
            if block_ids[i] < 0:
                continue
            source, target = records + i * record_bytes + offset, base + block_ids[i] * stride
            if kind == _AS_IS:
                _move(source, target, size)
                continue
            codes = carray(_pointer(source), count, np.uint8)
            scales = carray(_pointer(records + i * record_bytes + scales_at), rows, np.float32)
            _decode(fp8, codes, rows, width, scales, bits.view(np.float32))
            _store(kind, bits, count, target)


@compiled("void(int64, int64, uint64[::1])")
def digest(records: Any, record_bytes: Any, digests: Any) -> None:
    """Digest whole records. records: the first record's address."""
    for i in range(digests.shape[0]):
        digests[i] = _digest(records + i * record_bytes, record_bytes // 8, np.uint64(0))
