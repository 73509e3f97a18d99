"""Make tables that read heads out of another rank's records into this rank's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from baton.handoff.forms import Cut, Form, Share, heads_of, part_bytes
from baton.handoff.layers import CacheLayer
from baton.kernels.kv_pack import AS_IS, SCALE_BYTES, KVTable, Place

_Piece = tuple[torch.Tensor, int, Place]  # a layer's blocks, [num_blocks, elements]; row width; place


def cut_tables(
    tables: Sequence[KVTable], layers: Sequence[CacheLayer], here: Form, rank: int, share: Share
) -> dict[int, KVTable]:
    """Return tables that unpack a share's records into this rank's blocks, by group, where it has any."""
    found = {}
    for number, table in enumerate(tables):
        members = [at for at, layer in enumerate(layers) if layer.group == number]
        begins = _begins([part_bytes(layers[at], share.form, share.rank) for at in members])
        pieces: list[_Piece] = []
        for cut in share.cuts:
            if cut.layer in members:
                place = members.index(cut.layer)
                ranks = (here.ranks, rank), (share.form.ranks, share.rank)
                ours, theirs = (len(heads_of(layers[cut.layer], *one)) for one in ranks)
                pieces += _pieces(
                    layers[cut.layer],
                    cut,
                    table.blocks[place],
                    (ours, theirs),
                    begin=begins[place],
                    wire=share.form.wire_dtype,
                )
        if pieces:
            if not table.on_cpu:
                pieces += _rest(pieces, share.form.wire_dtype, table, share.record_bytes)
            blocks, widths, places = zip(*pieces, strict=True)
            found[number] = KVTable(blocks, widths, share.form.wire_dtype, places, share.record_bytes)
    return found


def _begins(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:at]) for at in range(len(sizes))]


def _pieces(
    layer: CacheLayer, cut: Cut, blocks: torch.Tensor, heads: tuple[int, int], *, begin: int, wire: str
) -> Iterator[_Piece]:
    """Yield the pieces of a cut. heads: here and there; begin: offset of the layer in a record."""
    ours, theirs = heads
    size = layer.head_bytes // layer.element_bytes // layer.stretches  # adjacent elements of a head
    for stretch in range(layer.stretches):
        own, other = (stretch * ours + cut.here) * size, (stretch * theirs + cut.there) * size
        if wire == AS_IS or layer.element_bytes == 1:
            place = Place(begin + other * layer.element_bytes)
        else:
            scales = begin + theirs * layer.stretches * size + other // layer.row_width * SCALE_BYTES
            place = Place(begin + other, scales)
        yield blocks[:, own : own + cut.count * size], layer.row_width, place


def _rest(pieces: Sequence[_Piece], wire: str, table: KVTable, size: int) -> Iterator[_Piece]:
    """Yield the rest of a record as pieces to discard, because a GPU digests only what it moves."""
    taken = []
    for blocks, width, place in pieces:
        elements = blocks.shape[1]
        if wire == AS_IS or blocks.element_size() == 1:
            taken.append((place.offset, elements * blocks.element_size()))
        else:
            taken += [(place.offset, elements), (place.scales, elements // width * SCALE_BYTES)]
    at = 0
    for offset, length in [*sorted(taken), (size, 0)]:
        if offset > at:
            nowhere = torch.empty(offset - at, dtype=torch.uint8, device=table.device)
            yield nowhere.expand(table.num_blocks, -1), 1, Place(at)
        at = offset + length
