"""`kv_pack` for `python -m bench kernels`: its check, its shapes, and plain torch.

64 layers x 2,048 tokens in blocks of 16, scattered over caches four times as large: attention with 8 KV heads
of 128, and MLA's latent of 576, in bfloat16. On the CPU, there are only 4 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from baton.kernels.kv_pack import AS_IS, WIRE_DTYPES, KVTable, pack, unpack
from baton.kernels.kv_pack.table import LARGEST, TINY
from bench.kernels import Case

BLOCK, TOKENS, SPREAD = 16, 2048, 4
LAYERS = {"cpu": 4, "cuda": 64}
SHAPES = {"GQA": (8 * BLOCK * 2 * 128, 128), "MLA": (BLOCK * 576, 576)}  # elements per block, per row
STORED = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


class Cache:
    """Layers of random KV, and buffers for records of some of their blocks."""

    def __init__(
        self, layers: Sequence[tuple[int, int]], blocks: int, ids: Sequence[int], wire: str, device: str
    ) -> None:
        """Make layers of these sizes: (elements per block, elements per row)."""
        draw = torch.Generator().manual_seed(len(layers))
        one = {size: torch.randn(blocks, size, generator=draw).bfloat16() for size, _ in layers}
        self.blocks = [one[size].to(device, copy=True) for size, _ in layers]
        self.widths = [width for _, width in layers]
        self.table = KVTable(self.blocks, self.widths, wire)
        self.ids = torch.tensor(ids, device=device)
        self.records = torch.empty(len(ids), self.table.record_bytes, dtype=torch.uint8, device=device)
        self.digests = torch.empty(len(ids), dtype=torch.int64, device=device)
        pack(self.table, self.ids, self.records, self.digests)

    @property
    def kv_bytes(self) -> int:
        return len(self.ids) * sum(int(layer.shape[1] * layer.element_size()) for layer in self.blocks)


def plain_pack(cache: Cache) -> torch.Tensor:
    """Pack the same records without digests, layer by layer."""
    parts = []
    for layer, width in zip(cache.blocks, cache.widths, strict=True):
        part = layer.index_select(0, cache.ids)
        if cache.table.wire == AS_IS:
            parts.append(part.view(torch.uint8))
            continue
        rows = part.float().view(len(part), -1, width)
        most = rows.abs().amax(2, keepdim=True).clamp_(min=TINY)
        # A tensor: torch may multiply by a Python number's reciprocal, which changes a scale's last bit.
        largest = torch.full_like(most[:1, :1], LARGEST[cache.table.wire])
        codes = rows * (largest / most)
        codes = codes.round_() if cache.table.wire == "int8" else codes.clamp_(-448, 448)
        stored = codes.to(STORED[cache.table.wire]).view(torch.uint8).flatten(1)
        parts += [stored, (most / largest).flatten(1).view(torch.uint8)]
    return torch.cat(parts, dim=1)


def plain_unpack(cache: Cache) -> None:
    """Unpack records, without digests."""
    at = 0
    for layer, width, size in zip(cache.blocks, cache.widths, cache.table.part_bytes, strict=True):
        part = cache.records[:, at : at + size]
        at += size
        if cache.table.wire == AS_IS:
            layer.index_copy_(0, cache.ids, part.contiguous().view(layer.dtype))
            continue
        count = layer.shape[1]
        codes = part[:, :count].contiguous().view(STORED[cache.table.wire]).float()
        scales = part[:, count:].contiguous().view(torch.float32)
        rows = codes.view(len(part), -1, width) * scales[:, :, None]
        layer.index_copy_(0, cache.ids, rows.flatten(1).to(layer.dtype))


def check(device: str) -> None:
    """Compare the kernel and its alternatives with the CPU's form. Raises AssertionError if they differ."""
    shapes, ids = [SHAPES["GQA"], SHAPES["MLA"], (5 * BLOCK * 2 * 40, 40)], [4, 1, 7]
    for wire in WIRE_DTYPES:
        right, cache = (Cache(shapes, 9, ids, wire, one) for one in ("cpu", device))
        before = [layer.clone() for layer in right.blocks]
        _unpack(right)
        for name, made in (("pack", cache.records), ("plain_pack", plain_pack(cache))):
            if not torch.equal(made.cpu(), right.records):
                raise AssertionError(f"{name} is wrong: {wire}")
        if not torch.equal(cache.digests.cpu(), right.digests):
            raise AssertionError(f"the digests are wrong: {wire}")
        for way in (_unpack, plain_unpack):
            for layer, was in zip(cache.blocks, before, strict=True):
                layer.copy_(was)
            cache.digests.fill_(-1)
            way(cache)
            if not all(torch.equal(a.cpu(), b) for a, b in zip(cache.blocks, right.blocks, strict=True)):
                raise AssertionError(f"{way.__name__} is wrong: {wire}")
            if way is _unpack and not torch.equal(cache.digests.cpu(), right.digests):
                raise AssertionError(f"the digests of unpack are wrong: {wire}")


def _pack(cache: Cache) -> None:
    pack(cache.table, cache.ids, cache.records, cache.digests)


def _unpack(cache: Cache) -> None:
    unpack(cache.table, cache.records, cache.ids, cache.digests)


def cases(device: str) -> Iterator[Case]:
    """Yield packing and unpacking for each shape and format. Only one cache exists at a time."""
    layers = LAYERS[device.partition(":")[0]]
    count = TOKENS // BLOCK
    for (name, shape), wire in ((one, wire) for one in SHAPES.items() for wire in WIRE_DTYPES):
        draw = np.random.default_rng(0)
        ids = draw.permutation(SPREAD * count)[:count].tolist()
        cache = Cache([shape] * layers, SPREAD * count, ids, wire, device)
        moved = cache.kv_bytes + cache.records.numel()
        ways: dict[str, tuple[Callable[[Cache], object], Callable[[Cache], object]]] = {
            "kv_pack": (_pack, plain_pack),
            "kv_unpack": (_unpack, plain_unpack),
        }
        for way, (ours, plain) in ways.items():
            yield Case(
                name=f"{way} {name} {wire}",
                shape={"layers": layers, "tokens": TOKENS, "block": BLOCK, "row": shape[1], "wire": wire},
                bytes_moved=moved,
                run=partial(ours, cache),
                against={"plain torch": partial(plain, cache)},
            )
