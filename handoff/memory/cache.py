"""A rank's KV cache as blocks: gathered into records, scattered from records.

A record is the parts of one block of all layers of its group, layer after layer, as kernels/kv_pack packs
them: the block's bytes as they are, or quantised. Records of all groups have one size. Those of consecutive
blocks are consecutive, so that a puller which already has the first blocks asks for one contiguous range.
This code does not care what the bytes mean (heads first or tokens first, K and V apart or together, MLA's
latent, a state): both ends must agree on it, which the compatibility hash over `CacheLayer`s ensures.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from baton.handoff.forms import UNDIVIDED, Division, Form, Share
from baton.handoff.groups import Part
from baton.handoff.layers import CacheLayer
from baton.handoff.memory.cuts import cut_tables
from baton.handoff.memory.fill import Fill
from baton.handoff.memory.streams import Device, Mark
from baton.handoff.records import Bytes, Digests
from baton.kernels.kv_pack import KVTable

# vLLM's placeholder for a block that a sliding window has left behind: never read, never written.
NULL_BLOCK = 0
_SHARES = 64  # shares whose tables are cached
Tables = Mapping[int, KVTable]  # keyed by group


class Landing(ABC):
    """Write one pull's records into the cache, from one thread, which owns the blocks meanwhile."""

    def __init__(self, what: str, seed: int, tables: Tables) -> None:
        """Start. what: the pulled KV, for error texts; seed: of its digests; tables: by group."""
        self.what = what
        self.seed = seed
        self._tables = tables
        self.check_s = 0.0  # time spent on digests that are computed separately
        self.load_s = 0.0

    @abstractmethod
    def take(self, part: Part, records: Bytes, saved: Digests) -> None:
        """Check a chunk against its digests and write it into the cache. `records` can be reused on return.

        part: the records' places and blocks. Raises DigestMismatch, possibly for an earlier chunk.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything taken is in the cache. Raises DigestMismatch."""

    @abstractmethod
    def close(self) -> None:
        """Wait until nothing writes to the blocks, however the pull ended. Idempotent."""


class BlockCache(ABC):
    """Copy between one rank's cache tensors and records.

    The caller ensures that the engine does not use the blocks meanwhile.
    """

    def __init__(
        self, layers: tuple[CacheLayer, ...], tables: tuple[KVTable, ...], division: Division = UNDIVIDED
    ) -> None:
        """Take `tables` by group, all with the same record size, wire format and device."""
        self.layers = layers
        self.device: Device | None = None  # set if the device can copy pinned records itself
        self.load_bytes = 0  # smallest efficient chunk of a load; 0: no preference
        self.rank = division.rank
        self.form = Form(division.ranks, tables[0].wire)
        self._tables = tables
        self._tables_for = functools.lru_cache(_SHARES)(self._cut)

    @property
    def record_bytes(self) -> int:
        """Bytes of one block's record."""
        return self._tables[0].record_bytes

    @abstractmethod
    def fill(self, parts: Sequence[Part], fill: Fill, after: Mark | None = None) -> None:
        """Gather cache blocks into the records of fill.view, and close it at the end.

        parts: everything the fill is to write, in order. Called on the engine's thread, after the step that
        wrote the blocks: on return the engine may overwrite them by work that it queues from then on, while
        the records may still be on their way. Other threads pass `after`, a `mark` set after that step; then
        the blocks have been read on return.
        """

    @abstractmethod
    def gather(self, group: int, block_ids: Sequence[int], records: Bytes) -> Digests:
        """Gather blocks of a group at once.

        records: [n, record_bytes] uint8 in host memory. Returns their own digests.
        """

    @abstractmethod
    def landing(self, what: str, seed: int, after: Mark | None = None, share: Share | None = None) -> Landing:
        """Return a landing for one pull, on its thread.

        after: a `mark` from when the blocks became the pull's. share: the one whose records are pulled; whole
        records of this rank by default.
        """

    def _tables_of(self, share: Share | None) -> Tables:
        if share is None or (share.form, share.rank) == (self.form, self.rank):
            return dict(enumerate(self._tables))
        return self._tables_for(share)

    def _cut(self, share: Share) -> Tables:
        return cut_tables(self._tables, self.layers, self.form, self.rank, share)

    def mark(self) -> Mark | None:
        """Mark the work that the engine has queued so far, so that reads or writes can wait for it."""
        return None

    def pin(self, memory: Bytes) -> None:  # noqa: B027 (host memory needs nothing)
        """Prepare host memory to which records will be written for as long as the process lives."""

    def close(self) -> None:  # noqa: B027
        """Wait for fills under way. Idempotent."""


def wanted(block_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return block ids for unpacking: NULL_BLOCK becomes -1, which is not written."""
    ids = np.array(block_ids, np.int64)
    ids[ids == NULL_BLOCK] = -1
    return ids


def pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of at least one piece, each of at most `most`."""
    step = max(1, most)
    for start in range(0, total, step):
        yield start, min(start + step, total)
