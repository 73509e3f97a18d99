"""Gather and scatter a KV cache in host memory, on the calling thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from baton.handoff import digests
from baton.handoff.forms import UNDIVIDED, Division, Share
from baton.handoff.groups import Part
from baton.handoff.layers import CacheLayer
from baton.handoff.memory.cache import BlockCache, Landing, Tables, pieces, wanted
from baton.handoff.memory.fill import Fill
from baton.handoff.memory.streams import Mark
from baton.handoff.records import Bytes, Digests
from baton.kernels import kv_pack
from baton.kernels.kv_pack import KVTable

# Records are digested and then copied, in pieces that stay in the L2 cache.
_CACHED_BYTES = 512 << 10


class HostBlockCache(BlockCache):
    """A cache in host memory. All work is done on the calling thread. Thread-safe."""

    def __init__(
        self, layers: tuple[CacheLayer, ...], tables: tuple[KVTable, ...], division: Division = UNDIVIDED
    ) -> None:
        super().__init__(layers, tables, division)
        self.gather(0, (), np.empty((0, self.record_bytes), np.uint8))  # compile now, not in the first save

    def fill(self, parts: Sequence[Part], fill: Fill, after: Mark | None = None) -> None:
        del after  # a step has ended when it returns
        try:
            for part in parts:
                for start, stop in fill.view.pieces(part.first, part.stop, len(part.block_ids)):
                    block_ids = part.within(start, stop).block_ids
                    fill.add(self.gather(part.group, block_ids, fill.view.records(start, stop)))
        finally:
            fill.close()

    def gather(self, group: int, block_ids: Sequence[int], records: Bytes) -> Digests:
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
