"""The layout of saves in shared memory, for their writer and their readers.

    header 0, header 1, ... | padding to a page | record 0, record 1, ...
                                                ^ `offset` of the transports' offers

A slot is a header and its record. A save has one slot per block, in order, or a window of fewer slots, in
which record r is in slot r % slots once record r - slots has been taken. A header has a ticket, which is the
save's number (tickets.py) from publication until another save gets the slot; the record's digest; and a
state, one word, written atomically: the record's number, and whether it is coming, whole or failed. A reader
that finds the same ticket and number before and after its copy knows that the bytes did not change (the idea
of a sequence lock).
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from baton.handoff import digests
from baton.handoff.errors import AlreadyTaken, SaveFailed
from baton.handoff.memory.segments import PAGE
from baton.handoff.records import Bytes, Digests

HEADER_BYTES = 32
_WORDS = HEADER_BYTES // 8
_TICKET, _STATE, _DIGEST = range(3)
_COMING, _WHOLE, _FAILED = range(3)  # the low bits of a state; the record's number is above them
_NUMBER, _KIND = np.uint64(2), np.uint64(3)  # shift, mask
# Polling intervals of a waiting reader. A 4 MiB chunk takes about the shortest interval to arrive from a
# device, a prefill step a few hundred times as long; so the first interval is a fraction of the last wait.
# Polling too often cost a decode worker on one core a tenth of that core.
_LOOK_S, _LOOK_GROWTH, _LOOK_MOST_S = 0.0001, 1.25, 0.002
_LOOK_PART = 0.125  # share of the last wait

Run = tuple[int, int]  # neighbouring slots: first, count


def records_at(slots: int) -> int:
    """Return the offset of the first record in a segment of `slots` slots."""
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
    found: list[Run] = []
    for first, count in runs:
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((first, count))
    return found


def are_inside(runs: Sequence[Run], size: int, offset: int, record_bytes: int) -> bool:
    """Return whether these slots fit into `size` bytes whose records begin at `offset`."""
    last = max((first + count for first, count in runs), default=0)
    return (
        bool(runs)
        and offset % PAGE == 0
        and last * HEADER_BYTES <= offset
        and offset + last * record_bytes <= size
        and all(count > 0 for _, count in runs)
    )


class SavePlan:
    """The offsets of one save's headers and records in its segment, by block number."""

    def __init__(self, offset: int, record_bytes: int, runs: Sequence[Run]) -> None:
        """offset: of the segment's first record; runs: the save's slots."""
        self._offset = offset
        self._record_bytes = record_bytes
        firsts, counts = np.array(runs, np.int64).T
        ends = np.cumsum(counts)
        self._slots: npt.NDArray[np.int64] = np.repeat(firsts - ends + counts, counts) + np.arange(ends[-1])
        self._ends: list[int] = ends.tolist()  # ends of the runs, in blocks

    @property
    def slots(self) -> int:
        return len(self._slots)

    def pieces(self, first: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of pieces with contiguous records, of at most `most` blocks each."""
        while first < stop:
            lap = first - first % self.slots
            end = lap + self._ends[bisect.bisect(self._ends, first - lap)]
            last = min(first + most, end, stop)
            yield first, last
            first = last

    def headers_of(self, first: int, stop: int) -> tuple[int, int]:
        """Return the offset and size of a piece's headers, in bytes."""
        return int(self._slots[first % self.slots]) * HEADER_BYTES, (stop - first) * HEADER_BYTES

    def records_of(self, first: int, stop: int) -> tuple[int, int]:
        """Return the offset and size of the records of (part of) a piece, in bytes."""
        start = self._offset + int(self._slots[first % self.slots]) * self._record_bytes
        return start, (stop - first) * self._record_bytes

    def _at(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        if stop <= self.slots:
            return self._slots[first:stop]
        found: npt.NDArray[np.int64] = self._slots[np.arange(first, stop) % self.slots]
        return found


def are_signed(headers: Digests, ticket: int) -> bool:
    """Return whether all of these headers, [n, HEADER_BYTES / 8], have the ticket."""
    return bool((headers[:, _TICKET] == ticket).all())


def whole_ones(headers: Digests, first: int, what: str) -> int:
    """Return how many records from `first` on can be read. Raises SaveFailed if one failed."""
    states = headers[:, _STATE]
    if (states & _KIND == _FAILED).any():
        raise SaveFailed(f"{what}: the source could not save it all")
    coming = np.flatnonzero(states != _states(first, first + len(headers), _WHOLE))
    return int(coming[0]) if len(coming) else len(headers)


def digests_in(headers: Digests) -> Digests:
    return headers[:, _DIGEST].copy()


class SaveView(SavePlan):
    """Access to one save's headers and records. No lock is needed: one process writes, word by word."""

    def __init__(self, memory: Bytes, offset: int, record_bytes: int, runs: Sequence[Run]) -> None:
        """memory: a segment; offset: of its first record; runs: the save's slots."""
        super().__init__(offset, record_bytes, runs)
        self._memory = memory
        self._waited_s = 0.0  # duration of the last wait for a record
        self._headers: Digests = memory[:offset].view(np.uint64).reshape(-1, _WORDS)

    # ---- headers

    def sign(self, ticket: int) -> None:
        """Write a ticket to all slots; 0 wipes it."""
        self._headers[self._slots, _TICKET] = ticket

    def holds(self, ticket: int, first: int, stop: int) -> bool:
        """Return whether all slots of blocks `first` to `stop` have the ticket."""
        return are_signed(self._headers[self._at(first, min(stop, first + self.slots))], ticket)

    def lends(self, ticket: int, first: int, stop: int) -> bool:
        """Return whether the ticket's blocks `first` to `stop` are all readable."""
        states = self._headers[self._at(first, stop), _STATE]
        return self.holds(ticket, first, stop) and bool((states == _states(first, stop, _WHOLE)).all())

    def expect(self, first: int = 0, stop: int | None = None) -> None:
        """Mark records as coming; by default one per slot."""
        stop = first + self.slots if stop is None else stop
        self._headers[self._at(first, stop), _STATE] = _states(first, stop, _COMING)

    def arrived(self, first: int, own: Digests) -> None:
        """Mark the records from block `first` on as written. own: their digests, seeded."""
        slots = self._at(first, first + len(own))
        self._headers[slots, _DIGEST] = own
        self._headers[slots, _STATE] = _states(first, first + len(own), _WHOLE)

    def is_whole(self, record: int) -> bool:
        state = self._headers[self._at(record, record + 1), _STATE]
        return bool(state[0] == _states(record, record + 1, _WHOLE)[0])

    def fail(self) -> None:
        states = self._headers[self._slots, _STATE]
        coming = states & _KIND == _COMING
        self._headers[self._slots[coming], _STATE] = states[coming] | np.uint64(_FAILED)

    @property
    def whole(self) -> int:
        return int((self._headers[self._slots, _STATE] & _KIND == _WHOLE).sum())

    def wait(self, first: int, stop: int, what: str, check: Callable[[], None]) -> int:
        """Wait until record `first` can be read. Return the end of the readable records, at most `stop`.

        check: called between polls, and may raise. Raises SaveFailed, and AlreadyTaken if a later record has
        the slot.
        """
        slots, began_s = self._at(first, stop), time.monotonic()
        look_s = min(_LOOK_MOST_S, max(_LOOK_S, _LOOK_PART * self._waited_s))
        wanted = _states(first, first + 1, _WHOLE)[0]
        while not (count := whole_ones(headers := self._headers[slots], first, what)):
            if headers[0, _STATE] > wanted:
                check()  # raises if another save has the slots
                raise AlreadyTaken(f"{what}: block {first} was taken before, and its slot was reused")
            check()
            time.sleep(look_s)
            look_s = min(look_s * _LOOK_GROWTH, _LOOK_MOST_S)
        self._waited_s = time.monotonic() - began_s
        return first + count

    def digests(self, first: int, stop: int) -> Digests:
        return digests_in(self._headers[self._at(first, stop)])

    # ---- records

    def records(self, first: int, stop: int) -> Bytes:
        """Return the records of (part of) a piece: [stop - first, record_bytes] uint8."""
        start, size = self.records_of(first, stop)
        return self._memory[start : start + size].reshape(stop - first, self._record_bytes)


class Fill:
    """Publish consecutive records of a save as they are written. Call `close` once, at the end.

    There is one Fill per prefill step, or per part of a window. The memory is not reused before `close`, even
    if the lease ends.
    """

    def __init__(
        self, view: SaveView, seed: int, closed: Callable[[bool], None], first: int, stop: int
    ) -> None:
        """Write records `first` to `stop`. closed: called by `close` with whether all were written."""
        self.view = view
        self._seed = seed
        self._closed = closed
        self._whole = first
        self._stop = stop

    def add(self, own: Digests) -> None:
        """Publish the next records, which are written. own: their unseeded digests."""
        self.view.arrived(self._whole, digests.seeded(own, self._seed, self._whole))
        self._whole += len(own)

    def close(self) -> None:
        """End writing. Readers of missing records get an error."""
        complete = self._whole == self._stop
        if not complete:
            self.view.fail()
        self._closed(complete)


def _states(first: int, stop: int, kind: int) -> Digests:
    return np.arange(first, stop, dtype=np.uint64) << _NUMBER | np.uint64(kind)
