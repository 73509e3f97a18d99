"""The definition of the digest and of both operations, one byte and one row at a time."""

import struct

import torch

from baton.kernels.kv_pack.table import AS_IS, LARGEST, TINY, WORD

_MASK = (1 << 64) - 1


def digest(record):
    """Return a record's digest (README.md, "The digest"). The record's size is a multiple of 8."""
    total = 0
    for position in range(len(record) // WORD):
        (word,) = struct.unpack_from("<Q", record, position * WORD)
        x = word ^ ((position + 1) * 0x9E3779B97F4A7C15 & _MASK)
        x = x * 0xBF58476D1CE4E5B9 & _MASK
        x ^= x >> 32
        x = x * 0x94D049BB133111EB & _MASK
        x ^= x >> 32
        total = total + x & _MASK
    return total


def pack(blocks, widths, wire, block_ids):
    """Return records and their digests. blocks: [num_blocks, elements] per layer."""
    records = []
    for block in block_ids:
        record = b""
        for layer, width in zip(blocks, widths, strict=True):
            if wire == AS_IS or layer.element_size() == 1:
                record += _bytes(layer[block])
            else:
                rows = [_quantise(row, wire) for row in layer[block].float().reshape(-1, width)]
                record += b"".join(codes for codes, _ in rows)
                record += b"".join(struct.pack("<f", scale) for _, scale in rows)
        records.append(record)
    return records, [digest(record) for record in records]


def unpack(records, widths, wire, block_ids, blocks):
    """Write the records into the blocks; skip negative block ids."""
    for record, block in zip(records, block_ids, strict=True):
        at = 0
        for layer, width in zip(blocks, widths, strict=True):
            elements = layer.shape[1]
            if wire == AS_IS or layer.element_size() == 1:
                size = elements * layer.element_size()
                values = _tensor(record[at : at + size], layer.dtype)
            else:
                rows, size = elements // width, elements + elements // width * 4
                codes = _tensor(record[at : at + elements], _STORED[wire]).float().reshape(rows, width)
                scales = struct.unpack_from(f"<{rows}f", record, at + elements)
                values = torch.cat([row * scale for row, scale in zip(codes, scales, strict=True)])
            at += size
            if block >= 0:
                layer[block] = values.to(layer.dtype)


_STORED = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def _quantise(row, wire):
    """Return a row's codes and their scale. row: float32."""
    largest = torch.tensor(LARGEST[wire])
    most = row.abs().max().clamp(min=TINY)
    scaled = row * (largest / most)
    codes = scaled.clamp(-largest, largest) if wire == "fp8_e4m3" else scaled.round()
    return _bytes(codes.to(_STORED[wire])), float(most / largest)


def _bytes(values):
    return bytes(values.contiguous().view(torch.uint8).tolist())


def _tensor(content, dtype):
    return torch.tensor(list(content), dtype=torch.uint8).view(dtype)
