"""A KV cache in host memory: gathered and scattered on the calling thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from baton.handoff import digests
from baton.handoff.layers import CacheLayer
from baton.handoff.memory.cache import BlockCache, Landing, pieces, wanted
from baton.handoff.memory.fill import Fill
from baton.handoff.memory.streams import Mark
from baton.handoff.records import Bytes, Digests
from baton.kernels import kv_pack
from baton.kernels.kv_pack import KVTable

# Records are digested and then copied: in pieces of this size the second pass finds them in the L2 cache.
_CACHED_BYTES = 512 << 10


class HostBlockCache(BlockCache):
    """A cache in host memory: all work is done on the calling thread, on return. Any thread may call."""

    def __init__(self, layers: tuple[CacheLayer, ...], table: KVTable) -> None:
        super().__init__(layers, table)
        self.gather((), np.empty((0, table.record_bytes), np.uint8))  # compiles: no save shall wait for that

    def fill(self, block_ids: Sequence[int], fill: Fill) -> None:
        try:
            for start, stop in fill.view.pieces(0, len(block_ids), len(block_ids)):
                fill.add(self.gather(block_ids[start:stop], fill.view.records(start, stop)))
        finally:
            fill.close()

    def gather(self, block_ids: Sequence[int], records: Bytes) -> Digests:
        own = np.empty(len(block_ids), np.uint64)
        kv_pack.pack(self._table, np.asarray(block_ids, np.int64), records, own)
        return own

    def scatter(self, records: Bytes, block_ids: Sequence[int]) -> None:
        """Write records to cache blocks; NULL_BLOCK is left alone."""
        kv_pack.unpack(self._table, records, wanted(block_ids), None)

    def landing(self, what: str, seed: int, after: Mark | None = None) -> Landing:
        del after  # the engine's steps end before the next begins
        return _HostLanding(self, what, seed)


class _HostLanding(Landing):
    """A landing that checks first and copies then: nothing of a broken chunk reaches the cache."""

    def __init__(self, cache: HostBlockCache, what: str, seed: int) -> None:
        super().__init__(what, seed)
        self._cache = cache

    def take(self, first_block: int, records: Bytes, saved: Digests, block_ids: Sequence[int]) -> None:
        began = time.monotonic()
        for start, stop in pieces(len(records), _CACHED_BYTES // self._cache.record_bytes):
            piece = records[start:stop]
            came = digests.of_records(piece, self.seed, first_block + start)
            digests.compare(self.what, first_block + start, came, saved[start:stop])
            checked = time.monotonic()
            self._cache.scatter(piece, block_ids[start:stop])
            self.check_s += checked - began
            began = time.monotonic()
            self.load_s += began - checked

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
