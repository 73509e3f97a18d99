"""Room in shared memory: segments created ahead of need, handed out in pieces, bounded.

`Arena` is safe to call from any thread. First fit over sorted holes: the pieces are few (one a saved
prompt) and live for about as long as one pull, so fragmentation stays small.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.handoff import segments
from baton.handoff.errors import StagingFull
from baton.handoff.segments import Bytes, Segment

logger = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes; a cache line
SEGMENT_BYTES = 64 << 20


def align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class _Pool:
    """A segment and its holes. Invariant: they are sorted, apart from each other, and inside the segment."""

    segment: Segment
    holes: list[tuple[int, int]] = field(default_factory=list)  # (offset, size)

    @property
    def size(self) -> int:
        return len(self.segment.data)

    def take(self, size: int) -> int | None:
        for i, (offset, hole) in enumerate(self.holes):
            if hole >= size:
                self.holes[i : i + 1] = [(offset + size, hole - size)] if hole > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        i = bisect.bisect(self.holes, (offset, 0))
        start, stop, first, last = offset, offset + size, i, i
        if i > 0 and sum(self.holes[i - 1]) == start:
            start, first = self.holes[i - 1][0], i - 1
        if i < len(self.holes) and self.holes[i][0] == stop:
            stop, last = sum(self.holes[i]), i + 1
        self.holes[first:last] = [(start, stop - start)]


@dataclass(frozen=True)
class Place:
    """A piece of a segment; given back once, with `Arena.free`."""

    pool: _Pool = field(repr=False)
    offset: int
    size: int

    @property
    def segment(self) -> str:
        return self.pool.segment.name

    @property
    def data(self) -> Bytes:
        """[size] uint8, writable."""
        return self.pool.segment.data[self.offset : self.offset + self.size]


class Arena:
    """At most `bound` bytes in segments of `segment_bytes` (or of one piece, where that is larger)."""

    def __init__(
        self,
        bound: int,
        segment_bytes: int = SEGMENT_BYTES,
        create: Callable[[int], Segment] = segments.create,
    ) -> None:
        self._bound = bound
        self._segment_bytes = min(segment_bytes, bound)
        self._create = create
        self._pools: list[_Pool] = []
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # held while a segment is being made; taken before _lock
        self._low = threading.Event()
        self._closed = False
        self._grower = threading.Thread(target=self._grow_ahead, name="baton-arena", daemon=True)
        self._low.set()
        self._grower.start()

    @property
    def capacity(self) -> int:
        """Bytes in segments, used or not."""
        with self._lock:
            return sum(pool.size for pool in self._pools)

    @property
    def free_bytes(self) -> int:
        """Bytes in holes."""
        with self._lock:
            return self._free()

    def allocate(self, size: int) -> Place:
        """A place of `size` bytes, rounded up to the alignment. Raises StagingFull.

        Takes microseconds where a segment has room, which the thread that grows ahead sees to; else it
        makes one.
        """
        size = align(size)
        place = self._take(size)
        if place is None:
            with self._growing:
                place = self._take(size) or self._take_from_new(size)
        if place is None:
            raise StagingFull(
                f"no room for {size} bytes of KV: {self.capacity - self.free_bytes} of {self._bound} bytes"
                " wait to be pulled; raise handoff.staging_mib or add decode workers"
            )
        return place

    def free(self, place: Place) -> None:
        with self._lock:
            place.pool.give(place.offset, place.size)

    def close(self) -> None:
        """Remove every segment. Idempotent. Places stay readable as long as somebody holds them."""
        self._closed = True
        self._low.set()
        self._grower.join(timeout=5)
        with self._lock:
            for pool in self._pools:
                pool.segment.close()
            self._pools.clear()

    def _free(self) -> int:
        return sum(size for pool in self._pools for _, size in pool.holes)

    def _take(self, size: int) -> Place | None:
        with self._lock:
            place = next(
                (Place(pool, at, size) for pool in self._pools if (at := pool.take(size)) is not None), None
            )
            if self._free() < self._segment_bytes // 2:
                self._low.set()
            return place

    def _take_from_new(self, size: int) -> Place | None:
        """Under _growing."""
        return self._take(size) if self._add_segment(max(size, self._segment_bytes)) else None

    def _add_segment(self, size: int) -> bool:
        """Under _growing. False: the bound is reached, or /dev/shm is full."""
        room = self._bound - self.capacity
        if self._closed or room < size:
            return False
        try:
            segment = self._create(size)
        except OSError as error:
            logger.warning("no more shared memory (%s): staging stays at %d bytes", error, self.capacity)
            self._bound = self.capacity
            return False
        with self._lock:
            self._pools.append(_Pool(segment, [(0, size)]))
        return True

    def _grow_ahead(self) -> None:
        while not self._closed:
            self._low.wait()
            self._low.clear()
            with self._growing:
                if self._closed or self.free_bytes >= self._segment_bytes // 2:
                    continue
                self._add_segment(
                    min(self._segment_bytes, self._bound - self.capacity) or self._segment_bytes
                )
