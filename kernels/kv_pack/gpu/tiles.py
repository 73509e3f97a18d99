"""Cut a layer's part of a block into tiles, one per program."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kernels.kv_pack.table import SCALE_BYTES, WORD, PartKind

TILE_WORDS = 2048  # copied words per tile: 16 KiB, 64 bytes for each thread
WARPS = 8


@dataclass(frozen=True)
class Cut:
    """The way a kernel cuts quantised rows into tiles."""

    rows: int  # maximum rows per tile
    warps: int
    constants: dict[str, int]  # the kernel's compile-time arguments


def tiles_of(row: list[int], rows_a_tile: int) -> list[tuple[int, ...]]:
    """Return one layer's tiles, of nearly equal size: a small tile costs as much as a full one."""
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
    """Return (start, count) of nearly equal pieces of at most `most`. Starts are even, so no word is cut."""
    step = -(-total // -(-total // most))
    step += step % 2
    return [(at, min(step, total - at)) for at in range(0, total, step)]
