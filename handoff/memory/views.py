"""The layout of saves in shared memory, for their writer and their readers.

    header 0, header 1, ... | padding to a page | record 0, record 1, ...
                                                ^ Shard.offset

A slot is a header and its record. A save has one slot for each block, in the order of the blocks; or a window
of fewer, in which record r lies in slot r % slots, after record r - slots was taken. As headers stand apart,
the records of neighbouring slots are contiguous.

A header holds its slot's ticket, state and digest. The ticket is the save's own number (tickets.py), written
at publication and wiped before another save gets the slot. The state is a single word, written atomically:
the record's number, and whether it is coming, whole or failed. A reader in another process that finds the
same ticket and number before and after its copy knows that the bytes did not change meanwhile (the idea of a
sequence lock). The first records can be read while the rest of an accelerator's KV is still being copied to
the host, so that one chunk is sent while the next is packed.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from baton.handoff.errors import AlreadyTaken, SaveFailed
from baton.handoff.memory.segments import PAGE
from baton.handoff.records import Bytes, Digests

HEADER_BYTES = 32
_WORDS = HEADER_BYTES // 8
_TICKET, _STATE, _DIGEST = range(3)
_COMING, _WHOLE, _FAILED = range(3)  # the low bits of a state; the record's number is above them
_NUMBER, _KIND = np.uint64(2), np.uint64(3)  # shift, mask
# Intervals between looks for a record. A chunk of 4 MiB takes about as long to arrive from a device as the
# shortest one; a step of a prompt still being computed takes some hundred times that, so the first look comes
# after a part of the last wait. Each look wakes a thread beside the engine's, which cost a decode worker on
# one core a tenth of it.
_LOOK_S, _LOOK_GROWTH, _LOOK_MOST_S = 0.0001, 1.25, 0.002
_LOOK_PART = 0.125  # fraction of the last wait

Run = tuple[int, int]  # neighbouring slots: the first one, and how many


def records_at(slots: int) -> int:
    """Return the offset of the first record in a segment of `slots` slots, in bytes."""
    return -(-slots * HEADER_BYTES // PAGE) * PAGE


def bytes_for(slots: int, record_bytes: int) -> int:
    """Return the bytes that `slots` slots take, headers included."""
    return records_at(slots) + slots * record_bytes


def slots_in(size: int, record_bytes: int) -> int:
    """Return the number of slots that fit in `size` bytes, headers included."""
    slots = size // (record_bytes + HEADER_BYTES)
    while slots and bytes_for(slots, record_bytes) > size:
        slots -= 1
    return slots


def joined(runs: Sequence[Run]) -> list[Run]:
    """Return the same slots in as few runs as possible."""
    found: list[Run] = []
    for first, count in runs:
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((first, count))
    return found


def are_inside(runs: Sequence[Run], size: int, offset: int, record_bytes: int) -> bool:
    """Return whether these slots can lie in memory of `size` bytes, whose records begin at `offset`."""
    last = max((first + count for first, count in runs), default=0)
    return (
        bool(runs)
        and offset % PAGE == 0
        and last * HEADER_BYTES <= offset
        and offset + last * record_bytes <= size
        and all(count > 0 for _, count in runs)
    )


class SavePlan:
    """Locate one save's headers and records in its segment, by block number."""

    def __init__(self, offset: int, record_bytes: int, runs: Sequence[Run]) -> None:
        """Take `offset`, that of the segment's first record, and `runs`, the save's slots."""
        self._offset = offset
        self._record_bytes = record_bytes
        firsts, counts = np.array(runs, np.int64).T
        ends = np.cumsum(counts)
        self._slots: npt.NDArray[np.int64] = np.repeat(firsts - ends + counts, counts) + np.arange(ends[-1])
        self._ends: list[int] = ends.tolist()  # ends of the runs, in blocks

    @property
    def slots(self) -> int:
        """Slots of the save: one for each record, or fewer."""
        return len(self._slots)

    def pieces(self, first: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of parts of at most `most` blocks whose records are contiguous."""
        while first < stop:
            lap = first - first % self.slots
            end = lap + self._ends[bisect.bisect(self._ends, first - lap)]
            last = min(first + most, end, stop)
            yield first, last
            first = last

    def headers_of(self, first: int, stop: int) -> tuple[int, int]:
        """Return the offset and size, in bytes, of a piece's headers."""
        return int(self._slots[first % self.slots]) * HEADER_BYTES, (stop - first) * HEADER_BYTES

    def records_of(self, first: int, stop: int) -> tuple[int, int]:
        """Return the offset and size, in bytes, of the records of a piece or of a part of one."""
        start = self._offset + int(self._slots[first % self.slots]) * self._record_bytes
        return start, (stop - first) * self._record_bytes

    def _at(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the slots of blocks `first` to `stop`."""
        if stop <= self.slots:
            return self._slots[first:stop]
        found: npt.NDArray[np.int64] = self._slots[np.arange(first, stop) % self.slots]
        return found


def are_signed(headers: Digests, ticket: int) -> bool:
    """Return whether the ticket is on all of these headers, [n, HEADER_BYTES / 8]."""
    return bool((headers[:, _TICKET] == ticket).all())


def whole_ones(headers: Digests, first: int, what: str) -> int:
    """Return how many records from `first` on are readable, by their headers.

    Raises SaveFailed if one of them will never arrive.
    """
    states = headers[:, _STATE]
    if (states & _KIND == _FAILED).any():
        raise SaveFailed(f"{what}: the source could not save it all")
    coming = np.flatnonzero(states != _states(first, first + len(headers), _WHOLE))
    return int(coming[0]) if len(coming) else len(headers)


def digests_in(headers: Digests) -> Digests:
    """Return a copy of the digests in these headers: [n]."""
    return headers[:, _DIGEST].copy()


class SaveView(SavePlan):
    """Read one save's headers and records, and let their owner write them.

    Reading and writing take no lock: one process writes, each number atomically.
    """

    def __init__(self, memory: Bytes, offset: int, record_bytes: int, runs: Sequence[Run]) -> None:
        """Take `memory`, a segment, `offset`, that of its first record, and `runs`, the save's slots."""
        super().__init__(offset, record_bytes, runs)
        self._memory = memory
        self._waited_s = 0.0  # duration of the last wait for a record
        self._headers: Digests = memory[:offset].view(np.uint64).reshape(-1, _WORDS)

    # ---- headers

    def sign(self, ticket: int) -> None:
        """Write a ticket to all slots; 0 wipes it."""
        self._headers[self._slots, _TICKET] = ticket

    def holds(self, ticket: int, first: int, stop: int) -> bool:
        """Return whether the ticket is on all slots of blocks `first` to `stop`."""
        return are_signed(self._headers[self._at(first, min(stop, first + self.slots))], ticket)

    def lends(self, ticket: int, first: int, stop: int) -> bool:
        """Return whether these slots hold the whole records of blocks `first` to `stop`, under the ticket."""
        states = self._headers[self._at(first, stop), _STATE]
        return self.holds(ticket, first, stop) and bool((states == _states(first, stop, _WHOLE)).all())

    def expect(self, first: int = 0, stop: int | None = None) -> None:
        """Mark records as coming, by default as many as there are slots."""
        stop = first + self.slots if stop is None else stop
        self._headers[self._at(first, stop), _STATE] = _states(first, stop, _COMING)

    def arrived(self, first: int, own: Digests) -> None:
        """Mark the records from block `first` on as written. own: their digests, seeded."""
        slots = self._at(first, first + len(own))
        self._headers[slots, _DIGEST] = own
        self._headers[slots, _STATE] = _states(first, first + len(own), _WHOLE)

    def is_whole(self, record: int) -> bool:
        """Return whether a record is in its slot and complete."""
        state = self._headers[self._at(record, record + 1), _STATE]
        return bool(state[0] == _states(record, record + 1, _WHOLE)[0])

    def fail(self) -> None:
        """Mark the records that did not arrive as failed: they never will."""
        states = self._headers[self._slots, _STATE]
        coming = states & _KIND == _COMING
        self._headers[self._slots[coming], _STATE] = states[coming] | np.uint64(_FAILED)

    @property
    def whole(self) -> int:
        """The number of records that can be read."""
        return int((self._headers[self._slots, _STATE] & _KIND == _WHOLE).sum())

    def wait(self, first: int, stop: int, what: str, check: Callable[[], None]) -> int:
        """Wait until the record of block `first` is whole. Return the end of the whole ones, at most `stop`.

        check: called between looks, and may raise. Raises SaveFailed if it will never be whole, AlreadyTaken
        if its slot has gone to a later one.
        """
        slots, began_s = self._at(first, stop), time.monotonic()
        look_s = min(_LOOK_MOST_S, max(_LOOK_S, _LOOK_PART * self._waited_s))
        wanted = _states(first, first + 1, _WHOLE)[0]
        while not (count := whole_ones(headers := self._headers[slots], first, what)):
            if headers[0, _STATE] > wanted:
                check()  # raises if the slots are no longer this save's
                raise AlreadyTaken(f"{what}: block {first} was taken before, and its slot was used again")
            check()
            time.sleep(look_s)
            look_s = min(look_s * _LOOK_GROWTH, _LOOK_MOST_S)
        self._waited_s = time.monotonic() - began_s
        return first + count

    def digests(self, first: int, stop: int) -> Digests:
        """Return a copy of the digests of blocks `first` to `stop`: [stop - first]."""
        return digests_in(self._headers[self._at(first, stop)])

    # ---- records

    def records(self, first: int, stop: int) -> Bytes:
        """Return the records of a piece or of a part of one: [stop - first, record_bytes] uint8."""
        start, size = self.records_of(first, stop)
        return self._memory[start : start + size].reshape(stop - first, self._record_bytes)


def _states(first: int, stop: int, kind: int) -> Digests:
    """Return the states of the records of blocks `first` to `stop`."""
    return np.arange(first, stop, dtype=np.uint64) << _NUMBER | np.uint64(kind)
