"""Gather a rank's KV cache into records, and scatter records into it.

A record has one block of all layers of its group, layer after layer, as is or quantised (kernels/kv_pack).
All records have one size, and consecutive blocks have consecutive records, so a puller that already has the
first blocks requests one contiguous range. This code does not depend on what the bytes mean (heads first or
tokens first, K and V apart or together, MLA's latent, a state): the compatibility hash over `CacheLayer`s
ensures that both ends agree.
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

NULL_BLOCK = 0  # vLLM's placeholder for blocks that a sliding window has passed: never read or written
_SHARES = 64  # shares whose tables are cached
Tables = Mapping[int, KVTable]  # keyed by group


class Landing(ABC):
    """Write one pull's records into the cache, from one thread."""

    def __init__(self, what: str, seed: int, tables: Tables) -> None:
        """Start a landing. what: names the KV in error texts; seed: of its digests; tables: by group."""
        self.what = what
        self.seed = seed
        self._tables = tables
        self.check_s = 0.0  # digests, if they are computed in a separate pass
        self.load_s = 0.0

    @abstractmethod
    def take(self, part: Part, records: Bytes, saved: Digests) -> None:
        """Check a chunk and write it into the cache. `records` may be reused on return.

        part: the records' places and blocks. Raises DigestMismatch, possibly for an earlier chunk.
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
        self._tables_for = functools.lru_cache(_SHARES)(self._cut)

    @property
    def record_bytes(self) -> int:
        return self._tables[0].record_bytes

    @abstractmethod
    def fill(self, parts: Sequence[Part], fill: Fill, after: Mark | None = None) -> None:
        """Gather the blocks of `parts`, which are all of the fill, and close the fill.

        The engine's thread calls this after the step that wrote the blocks. On return, the engine may queue
        work that overwrites them; the records may still be on their way. Other threads pass `after`, a `mark`
        set after that step, and on return the blocks have been read.
        """

    @abstractmethod
    def gather(self, group: int, block_ids: Sequence[int], records: Bytes) -> Digests:
        """Gather blocks of a group into `records`, [n, record_bytes] uint8. Returns unseeded digests."""

    @abstractmethod
    def landing(self, what: str, seed: int, after: Mark | None = None, share: Share | None = None) -> Landing:
        """Return a landing for one pull, on its thread.

        after: a `mark` from when the blocks were allocated. share: whose records are pulled; by default this
        rank's own records.
        """

    def _tables_of(self, share: Share | None) -> Tables:
        if share is None or (share.form, share.rank) == (self.form, self.rank):
            return dict(enumerate(self._tables))
        return self._tables_for(share)

    def _cut(self, share: Share) -> Tables:
        return cut_tables(self._tables, self.layers, self.form, self.rank, share)

    def mark(self) -> Mark | None:
        """Mark the work that the engine has queued so far, for others to wait for."""
        return None

    def pin(self, memory: Bytes) -> None:  # noqa: B027 (host memory needs nothing)
        """Pin staging memory for as long as the process lives."""

    def close(self) -> None:  # noqa: B027
        """Wait for fills under way. Idempotent."""


def wanted(block_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return block ids for unpacking, with -1 (not written) for NULL_BLOCK."""
    ids = np.array(block_ids, np.int64)
    ids[ids == NULL_BLOCK] = -1
    return ids


def pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of pieces of at most `most`."""
    step = max(1, most)
    for start in range(0, total, step):
        yield start, min(start + step, total)
