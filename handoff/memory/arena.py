"""The allocator of staging's shared memory: slots for one record each.

There is one segment, whose pages are faulted in step by step, ahead of need. A save gets one run of free
slots if one is long enough, else the longest runs.
"""

from __future__ import annotations

import bisect
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.handoff.errors import HandoffError, StagingFull
from baton.handoff.memory import segments
from baton.handoff.memory.segments import PAGE, Segment
from baton.handoff.memory.views import Run, SaveView, bytes_for, records_at, slots_in
from baton.handoff.records import Bytes
from baton.keeping import keep_thread

logger = logging.getLogger(__name__)

STEP_BYTES = 64 << 20


class _Holes:
    """The free slots, as runs.

    Invariant: runs are sorted, do not touch each other within a step, and do not cross the end of a step.
    Memory is pinned for an accelerator in steps, and no copy may span two of them.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._runs: list[Run] = []
        self.slots = 0

    def take(self, count: int) -> tuple[Run, ...]:
        self.slots -= count
        for i, (first, size) in enumerate(self._runs):
            if size >= count:
                self._runs[i : i + 1] = [(first + count, size - count)] if size > count else []
                return ((first, count),)
        taken = []
        for first, size in sorted(self._runs, key=lambda run: -run[1]):  # longest first, for few runs
            part = min(size, count)
            taken.append((first, part))
            count -= part
            if not count:
                break
        left = dict(self._runs)
        for first, part in taken:
            size = left.pop(first)
            if size > part:
                left[first + part] = size - part
        self._runs = sorted(left.items())
        return tuple(sorted(taken))

    def give(self, first: int, count: int) -> None:
        self.slots += count
        stop = first + count
        i = j = bisect.bisect(self._runs, (first, 0))
        if i > 0 and first % self._step and sum(self._runs[i - 1]) == first:
            i -= 1
            first = self._runs[i][0]
        if j < len(self._runs) and stop % self._step and self._runs[j][0] == stop:
            stop = sum(self._runs[j])
            j += 1
        self._runs[i:j] = [(first, stop - first)]


@dataclass(frozen=True)
class StagingSlots:
    """Allocated slots; give them back once, with `Arena.free`."""

    memory: Segment = field(repr=False)
    offset: int  # offset of the segment's first record
    record_bytes: int
    runs: tuple[Run, ...]

    @property
    def segment(self) -> str:
        return self.memory.name

    def view(self) -> SaveView:
        return SaveView(self.memory.data, self.offset, self.record_bytes, self.runs)


class Arena:
    """Allocate slots in at most `bound` bytes, headers included. Thread-safe."""

    def __init__(
        self,
        bound: int,
        record_bytes: int,
        step_bytes: int = STEP_BYTES,
        *,
        pin: Callable[[Bytes], None] | None = None,
        create: Callable[[int, int], Segment] = segments.create,
    ) -> None:
        """pin: called with each step of memory. Raises HandoffError for a bound below one slot."""
        self.record_bytes = record_bytes
        self.slots = slots_in(bound, record_bytes)
        if not self.slots:
            raise HandoffError(
                f"handoff.staging_mib is {bound / 2**20:g}, but the KV of one block takes"
                f" {bytes_for(1, record_bytes) / 2**20:.3g} MiB: raise it"
            )
        self._offset = records_at(self.slots)
        unit = PAGE // math.gcd(PAGE, record_bytes)  # the fewest records that end on a page boundary
        self._step = max(1, step_bytes // record_bytes // unit) * unit
        self._ahead = max(1, self._step // 2)
        self._pin = pin
        self._create = create
        self._segment: Segment | None = None
        self.grown = 0  # slots whose pages are faulted in
        self._holes = _Holes(self._step)
        self._lock = threading.Lock()
        self._growing = threading.Lock()  # held while pages are faulted in; taken before _lock
        self._low = threading.Event()
        self._closed = False
        self._grower = keep_thread(self._grow_ahead, "baton-arena")
        self._low.set()
        self._grower.start()

    @property
    def free_slots(self) -> int:
        with self._lock:
            return self._holes.slots + self.slots - self.grown

    def allocate(self, count: int) -> StagingSlots:
        """Return `count` slots, in microseconds if their pages are faulted in. Raises StagingFull."""
        place = self._take(count)
        if place is None:
            with self._growing:
                while (place := self._take(count)) is None and self._grow():
                    pass
        if place is None:
            free = self.free_slots
            raise StagingFull(
                f"no room for {count} blocks of KV: {self.slots - free} of {self.slots}, each of"
                f" {self.record_bytes} bytes, wait to be pulled; raise handoff.staging_mib or add decode"
                " workers"
            )
        return place

    def begin(self, size: int) -> None:
        """Fault in the first `size` bytes of records, but at least one step."""
        with self._growing:
            while self.grown * self.record_bytes < max(1, size) and self._grow():
                pass

    def free(self, place: StagingSlots) -> None:
        with self._lock:
            for run in place.runs:
                self._holes.give(*run)

    def close(self) -> None:
        """Remove the segment; mapped slots stay readable. Idempotent."""
        self._closed = True
        self._low.set()
        self._grower.join(timeout=5)
        with self._growing:
            if self._segment is not None:
                self._segment.close()

    def _take(self, count: int) -> StagingSlots | None:
        with self._lock:
            fits = self._segment is not None and count <= self._holes.slots
            runs = self._holes.take(count) if fits else ()
            if self._holes.slots < self._ahead:
                self._low.set()
        if self._segment is None or not fits:
            return None
        return StagingSlots(self._segment, self._offset, self.record_bytes, runs)

    def _grow(self) -> bool:
        """Fault in a step, under _growing. Return False if there is none left or /dev/shm is full."""
        first, count = self.grown, min(self._step, self.slots - self.grown)
        if self._closed or not count:
            return False
        start, stop = (self._offset + slot * self.record_bytes for slot in (first, first + count))
        stop = -(-stop // PAGE) * PAGE
        try:
            if self._segment is None:
                size = bytes_for(self.slots, self.record_bytes)
                self._segment = self._create(-(-size // PAGE) * PAGE, self._offset)
            self._segment.grow(start, stop)
        except OSError as error:
            held = first * self.record_bytes
            logger.warning("no more shared memory (%s): staging stays at %d bytes", error, held)
            self.slots = first
            return False
        if self._pin is not None:
            self._pin(self._segment.data[start if first else 0 : stop])
        with self._lock:
            self.grown = first + count
            self._holes.give(first, count)
        return True

    def _grow_ahead(self) -> None:
        while not self._closed:
            self._low.wait()
            self._low.clear()
            with self._growing:
                if self._holes.slots < self._ahead:
                    self._grow()
