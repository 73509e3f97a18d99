"""Gather a rank's KV cache into records, and scatter records into it.

A record has one block of all layers of its group, layer after layer, as is or quantised (kernels/kv_pack).
All records have the same size, and consecutive blocks have consecutive records, so a puller that already has
the first blocks requests one contiguous range. This code does not depend on what the bytes mean (heads or
tokens first, K and V apart or together, MLA's latent, a state): the compatibility hash over `CacheLayer`s
ensures that both ends agree.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from baton.handoff import digests
from baton.handoff.forms import (
    UNDIVIDED,
    CacheLayer,
    Cut,
    Division,
    Form,
    Share,
    heads_of,
    joined,
    part_bytes,
)
from baton.handoff.groups import Part
from baton.handoff.memory.streams import Device, Mark
from baton.handoff.memory.views import Fill
from baton.handoff.records import Bytes, Digests
from baton.kernels import kv_pack
from baton.kernels.kv_pack import AS_IS, SCALE_BYTES, KVTable, Place

NULL_BLOCK = 0  # vLLM's placeholder for blocks that a sliding window has passed: never read or written
_SHARES = 64  # shares whose tables are cached
Tables = Mapping[int, KVTable]  # keyed by group
_Piece = tuple[torch.Tensor, int, Place]  # a layer's blocks, [num_blocks, elements]; row width; place
# Records are digested and then copied, in pieces that stay in the L2 cache.
_CACHED_BYTES = 512 << 10


class Landing(ABC):
    """Write one pull's records into the cache, from one thread."""

    def __init__(self, what: str, seed: int, tables: Tables) -> None:
        """Start a landing. what: names the KV in error texts; seed: that of the digests; tables: by group."""
        self.what = what
        self.seed = seed
        self._tables = tables
        self.check_s = 0.0  # time for digests, if they are computed in a separate pass
        self.load_s = 0.0

    @abstractmethod
    def take(self, part: Part, records: Bytes, saved: Digests) -> None:
        """Check a chunk and write it into the cache. `records` may be reused on return.

        part: the records' positions and blocks. Raises DigestMismatch, possibly for an earlier chunk.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until all chunks are in the cache. Raises DigestMismatch."""

    @abstractmethod
    def close(self) -> None:
        """Wait until nothing writes to the blocks, even after an error. Idempotent."""


class BlockCache(ABC):
    """Copy between a rank's cache and records. The caller keeps the engine from using the blocks."""

    def __init__(
        self, layers: tuple[CacheLayer, ...], tables: tuple[KVTable, ...], division: Division = UNDIVIDED
    ) -> None:
        """tables: by group, with equal record size, wire format and device."""
        self.layers = layers
        self.device: Device | None = None  # set if records can be pinned for it
        self.load_bytes = 0  # smallest efficient chunk of a load; 0: no preference
        self.rank = division.rank
        self.form = Form(division.ranks, tables[0].wire)
        self._tables = tables
        self._tables_for = functools.lru_cache(_SHARES)(
            lambda share: _cut_tables(self._tables, self.layers, self.form, self.rank, share)
        )

    def join(self, stages: Sequence[tuple[CacheLayer, ...]], stage: int) -> None:
        """Take on a pipeline's layers, form and rank, before any load. stages: each stage's layers."""
        self.layers, numbers = joined(stages)
        self.form = replace(self.form, stages=numbers)
        self.rank += stage * self.form.ranks

    @property
    def record_bytes(self) -> int:
        return self._tables[0].record_bytes

    @abstractmethod
    def fill(self, parts: Sequence[Part], fill: Fill, after: Mark | None = None) -> None:
        """Gather the blocks of `parts`, which make up the whole fill, and close the fill.

        The engine's thread calls this after the step that wrote the blocks. On return, the engine may queue
        work that overwrites them; the records may still be on their way. Other threads pass `after`, a `mark`
        set after that step, and on return the blocks have been read.
        """

    @abstractmethod
    def landing(self, what: str, seed: int, after: Mark | None = None, share: Share | None = None) -> Landing:
        """Return a landing for one pull, to be used only on that pull's thread.

        after: a `mark` from when the blocks were allocated. share: what is pulled; by default, records of
        this rank's own form.
        """

    def _tables_of(self, share: Share | None) -> Tables:
        if share is None or (share.form, share.rank) == (self.form, self.rank):
            return dict(enumerate(self._tables))
        return self._tables_for(share)

    def mark(self) -> Mark | None:
        """Mark the work that the engine has queued so far, for other threads to wait for."""
        return None

    def pin(self, memory: Bytes) -> None:  # noqa: B027 (host memory needs nothing)
        """Pin staging memory for the life of the process."""

    def close(self) -> None:  # noqa: B027
        """Wait for fills under way. Idempotent."""


def wanted(block_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return block ids for unpacking, with -1 (not written) for NULL_BLOCK."""
    ids = np.array(block_ids, np.int64)
    ids[ids == NULL_BLOCK] = -1
    return ids


def pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Split `total` items into pieces of at most `most`, and yield (start, stop) of each piece."""
    step = max(1, most)
    for start in range(0, total, step):
        yield start, min(start + step, total)


class HostBlockCache(BlockCache):
    """A cache in host memory. All work is done on the calling thread. Thread-safe."""

    def __init__(
        self, layers: tuple[CacheLayer, ...], tables: tuple[KVTable, ...], division: Division = UNDIVIDED
    ) -> None:
        super().__init__(layers, tables, division)
        self.gather(0, (), np.empty((0, self.record_bytes), np.uint8))  # compile now, not in the first save

    def fill(self, parts: Sequence[Part], fill: Fill, after: Mark | None = None) -> None:
        del after  # on the CPU, a step's work is done when the step returns
        try:
            for part in parts:
                for start, stop in fill.view.pieces(part.first, part.stop, len(part.block_ids)):
                    block_ids = part.within(start, stop).block_ids
                    fill.add(self.gather(part.group, block_ids, fill.view.records(start, stop)))
        finally:
            fill.close()

    def gather(self, group: int, block_ids: Sequence[int], records: Bytes) -> Digests:
        """Gather blocks of a group into `records`, [n, record_bytes] uint8. Returns unseeded digests."""
        own = np.empty(len(block_ids), np.uint64)
        kv_pack.pack(self._tables[group], np.asarray(block_ids, np.int64), records, own)
        return own

    def scatter(
        self, group: int, records: Bytes, block_ids: Sequence[int], table: KVTable | None = None
    ) -> None:
        """Write records to blocks of a group, except NULL_BLOCK. table: layout of the records."""
        kv_pack.unpack(table or self._tables[group], records, wanted(block_ids), None)

    def landing(self, what: str, seed: int, after: Mark | None = None, share: Share | None = None) -> Landing:
        del after
        return _HostLanding(self, what, seed, self._tables_of(share))


class _HostLanding(Landing):
    """Check first, then copy, so that a corrupt chunk never reaches the cache."""

    def __init__(self, cache: HostBlockCache, what: str, seed: int, tables: Tables) -> None:
        super().__init__(what, seed, tables)
        self._cache = cache

    def take(self, part: Part, records: Bytes, saved: Digests) -> None:
        table = self._tables[part.group]
        began = time.monotonic()
        for start, stop in pieces(len(records), _CACHED_BYTES // table.record_bytes):
            piece = records[start:stop]
            came = digests.of_records(piece, self.seed, part.first + start)
            digests.compare(self.what, part.first + start, came, saved[start:stop])
            checked = time.monotonic()
            self._cache.scatter(part.group, piece, part.block_ids[start:stop], table)
            self.check_s += checked - began
            began = time.monotonic()
            self.load_s += began - checked

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


def _cut_tables(
    tables: Sequence[KVTable], layers: Sequence[CacheLayer], here: Form, rank: int, share: Share
) -> dict[int, KVTable]:
    """Return, by group, tables that unpack a share's records into this rank's blocks, if it has any."""
    found = {}
    for number, table in enumerate(tables):
        own, other = (
            [at for at in form.layers_of(one, len(layers)) if layers[at].group == number]
            for form, one in ((here, rank), (share.form, share.rank))
        )
        sizes = [part_bytes(layers[at], share.form, share.rank) for at in other]
        begins = [sum(sizes[:at]) for at in range(len(sizes))]
        pieces: list[_Piece] = []
        for cut in share.cuts:
            if cut.layer in own:
                ranks = (here.ranks, rank), (share.form.ranks, share.rank)
                ours, theirs = (len(heads_of(layers[cut.layer], *one)) for one in ranks)
                pieces += _pieces(
                    layers[cut.layer],
                    cut,
                    table.blocks[own.index(cut.layer)],
                    (ours, theirs),
                    begin=begins[other.index(cut.layer)],
                    wire=share.form.wire_dtype,
                )
        if pieces:
            if not table.on_cpu:
                pieces += _rest(pieces, share.form.wire_dtype, table, share.record_bytes)
            blocks, widths, places = zip(*pieces, strict=True)
            found[number] = KVTable(blocks, widths, share.form.wire_dtype, places, share.record_bytes)
    return found


def _pieces(
    layer: CacheLayer, cut: Cut, blocks: torch.Tensor, heads: tuple[int, int], *, begin: int, wire: str
) -> Iterator[_Piece]:
    """Yield the pieces of a cut. heads: how many here and there; begin: offset of the layer in a record."""
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
