"""A rank's KV cache as blocks: gathered into records, scattered from records.

A record is all layers' parts of one block, layer after layer, as kernels/kv_pack packs them: the block's
bytes as they are, or quantised. Records of consecutive blocks are consecutive, so that a puller which has
the first blocks already asks for one contiguous range. This code does not care what the bytes mean (heads
first or tokens first, K and V apart or together, MLA's latent): both ends must agree on it, which the
compatibility hash over `CacheLayer`s ensures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from baton.handoff.layers import CacheLayer
from baton.handoff.memory.fill import Fill
from baton.handoff.memory.streams import Mark
from baton.handoff.records import Bytes, Digests
from baton.kernels.kv_pack import KVTable

# vLLM's placeholder for a block that a sliding window has left behind: never read, never written.
NULL_BLOCK = 0


class Landing(ABC):
    """One pull's way into the cache, from one thread. The blocks are nobody else's until it ended."""

    def __init__(self, what: str, seed: int) -> None:
        """what: is pulled, for errors' texts; seed: of its digests."""
        self.what = what
        self.seed = seed
        self.check_s = 0.0  # for digests, where they are computed apart
        self.load_s = 0.0

    @abstractmethod
    def take(self, first_block: int, records: Bytes, saved: Digests, block_ids: Sequence[int]) -> None:
        """Check a chunk against its digests and put it into the cache. `records` can be reused on return.

        Raises DigestMismatch, possibly for an earlier chunk.
        """

    @abstractmethod
    def finish(self) -> None:
        """All that was taken is in the cache on return. Raises DigestMismatch."""

    @abstractmethod
    def close(self) -> None:
        """Nothing writes the blocks any more on return, however the pull ended. Idempotent."""


class BlockCache(ABC):
    """Copies between one rank's cache tensors and records.

    The caller sees to it that the engine does not use the blocks meanwhile.
    """

    def __init__(self, layers: tuple[CacheLayer, ...], table: KVTable) -> None:
        self.layers = layers
        self._table = table

    @property
    def wire_dtype(self) -> str:
        return self._table.wire

    @property
    def record_bytes(self) -> int:
        return self._table.record_bytes

    @abstractmethod
    def fill(self, block_ids: Sequence[int], fill: Fill) -> None:
        """Gather cache blocks into the records of fill.view, and close it in the end.

        Called on the engine's thread, after the step that wrote the blocks. On return the engine may reuse
        them, by what it then queues; the records may still be on their way.
        """

    @abstractmethod
    def gather(self, block_ids: Sequence[int], records: Bytes) -> Digests:
        """The same at once: [n, record_bytes] uint8 in host memory, overwritten; the records' own digests."""

    @abstractmethod
    def landing(self, what: str, seed: int, after: Mark | None = None) -> Landing:
        """A way for one pull, on its thread. after: a `mark` from when its blocks became its own."""

    def mark(self) -> Mark | None:
        """What the engine has queued so far, on its thread: a landing writes only after it."""
        return None

    def pin(self, memory: Bytes) -> None:  # noqa: B027 (host memory needs nothing)
        """Records will be written to this host memory for as long as the process lives."""

    def close(self) -> None:  # noqa: B027
        """Wait for fills under way. Idempotent."""


def wanted(block_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For unpacking: NULL_BLOCK is not written."""
    ids = np.array(block_ids, np.int64)
    ids[ids == NULL_BLOCK] = -1
    return ids


def pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of at most `most`, and of one at least."""
    step = max(1, most)
    for start in range(0, total, step):
        yield start, min(start + step, total)
