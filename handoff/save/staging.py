"""Staging: saved KV in shared memory, under leases.

An entry is `reserve`d, `publish`ed (which starts its lease), read by pulls, renewed, and ends once, by
`release` or expiry. Each prefill step writes its records with a `Fill`. A thread expires leases even while
the engine is idle. memory/views.py describes the layout in memory.

An entry with a window has fewer slots than records. Its pullers acknowledge records (`take`), whose slots are
then reused (backlog.py).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from baton.handoff import digests, windows
from baton.handoff.errors import HandoffError, LeaseExpired, MalformedManifest, UnknownHandoff
from baton.handoff.memory.arena import Arena, StagingSlots
from baton.handoff.memory.views import Fill, SaveView
from baton.handoff.records import Bytes, Records
from baton.handoff.reports import Key
from baton.handoff.tickets import Tickets
from baton.keeping import keep_thread
from baton.kernels import kv_pack

logger = logging.getLogger(__name__)

_REMEMBERED = 4096  # past entries, remembered to give late pulls the right error


@dataclass(eq=False)
class Entry:
    request_id: str
    epoch: int
    place: StagingSlots = field(repr=False)
    num_blocks: int
    slots: int
    filled: int = 0  # records whose writing has begun
    taken: int = 0  # records whose slots may be reused; always 0 without a window
    wanted: int = 0  # records before this place need no slot
    published_at: float = float("inf")  # CLOCK_MONOTONIC, seconds
    expires_at: float = float("inf")  # CLOCK_MONOTONIC, seconds
    readers: int = 0  # running pulls and open Fills
    growing: bool = False  # the prompt is still being computed
    ended: bool = False
    had_by: set[int] = field(default_factory=set, repr=False)  # ranks that have released the entry
    taken_by: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)  # rank -> (taken, wanted)

    @property
    def key(self) -> Key:
        return self.request_id, self.epoch

    @property
    def record_bytes(self) -> int:
        return self.place.record_bytes

    @property
    def windowed(self) -> bool:
        """Whether the entry has fewer slots than records."""
        return self.slots < self.num_blocks

    @property
    def room(self) -> int:
        """Number of further records that can be written now."""
        return min(self.num_blocks, max(self.taken, self.wanted) + self.slots) - self.next

    @property
    def next(self) -> int:
        """Position of the next record to write."""
        return max(self.filled, self.wanted)

    def take(self, taken: int, wanted: int, reader: tuple[int, int]) -> None:
        """Record what a rank has taken. Slots may be reused once all ranks have taken their records."""
        rank, readers = reader
        self.taken_by[rank] = taken, max(wanted, self.taken_by.get(rank, (0, 0))[1])
        if len(self.taken_by) >= readers:
            self.taken = min(one for one, _ in self.taken_by.values())
            self.wanted = min(max(each) for each in self.taken_by.values())

    @functools.cached_property
    def view(self) -> SaveView:
        return self.place.view()


def _nothing(*_: object) -> None:
    pass


class Staging:
    """The saved prompts of one rank. Thread-safe."""

    def __init__(self, arena: Arena, lease_s: float, ended: Callable[[str, int], None] = _nothing) -> None:
        """Start empty. ended: called, without a lock, with the key of each published entry that ends."""
        self.lease_s = lease_s
        self.tickets = Tickets()
        self._arena = arena
        self._on_end = ended
        # called, without a lock, when slots of a window can be reused, and when an entry has ended
        self.on_room: Callable[[], None] = _nothing
        self._entries: dict[Key, Entry] = {}
        self._pinned: dict[Entry, None] = {}  # published entries whose memory is not free yet, oldest first
        self._fates: OrderedDict[Key, type[HandoffError]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._reaper = keep_thread(self._reap, "baton-leases")
        self._reaper.start()

    def reserve(self, request_id: str, epoch: int, num_blocks: int, slots: int | None = None) -> Entry:
        """Allocate an unpublished entry. Raises StagingFull. slots: size of the window, if any."""
        slots = min(num_blocks, slots or num_blocks)
        entry = Entry(request_id, epoch, self._arena.allocate(slots), num_blocks, slots)
        entry.view.expect()
        return entry

    def filling(self, entry: Entry, first: int = 0, stop: int | None = None) -> Fill:
        """Return a Fill of records `first` to `stop`; they must fit. Raises UnknownHandoff, LeaseExpired."""
        stop = entry.num_blocks if stop is None else stop
        with self._changed:
            self.check(entry)
            entry.readers += 1
            if stop > entry.slots:
                entry.view.expect(max(first, entry.slots), stop)
            entry.filled = stop
        return Fill(
            entry.view, digests.seed(*entry.key), functools.partial(self._written, entry), first, stop
        )

    def fill(self, entry: Entry, chunk_bytes: int, write: Callable[[Bytes, int], None]) -> None:
        """Fill a new entry; on errors, discard it. write: gets records [n, record_bytes] and their place."""
        try:
            fill = self.filling(entry)
            try:
                most = max(1, chunk_bytes // entry.record_bytes)
                for first, stop in entry.view.pieces(0, entry.num_blocks, most):
                    records, own = entry.view.records(first, stop), np.empty(stop - first, np.uint64)
                    write(records, first)
                    kv_pack.digest(records, own)
                    fill.add(own)
            finally:
                fill.close()
        except BaseException:
            self.discard(entry)
            raise

    def check(self, entry: Entry) -> None:
        """Raise UnknownHandoff or LeaseExpired if the entry was released or has expired."""
        if entry.ended:
            raise self._fate(*entry.key)

    def publish(self, entry: Entry, *, growing: bool = False) -> None:
        """Start an entry's lease; end an older entry with its key. growing: more records will come."""
        with self._changed:
            entry.growing = growing
            older = self._entries.get(entry.key)
            if older is not None:
                self._end(older, UnknownHandoff)
            entry.view.sign(self.tickets.number(*entry.key))
            entry.published_at = time.monotonic()
            entry.expires_at = entry.published_at + self.lease_s
            self._entries[entry.key] = entry
            self._pinned[entry] = None
            self._changed.notify()
        if older is not None:
            self._tell_end(*entry.key)

    def grown(self, entry: Entry) -> None:
        entry.growing = False

    def discard(self, entry: Entry) -> None:
        with self._changed:
            self._abandon(entry)

    @contextlib.contextmanager
    def opened(self, request_id: str, epoch: int) -> Iterator[Entry]:
        """Keep an entry's memory from being reused, even after its lease ends.

        Raises UnknownHandoff, LeaseExpired.
        """
        with self._changed:
            entry = self._entries.get((request_id, epoch))
            if entry is None:
                raise self._fate(request_id, epoch)
            entry.readers += 1
        try:
            yield entry
        finally:
            self._left(entry)

    def read(
        self,
        request_id: str,
        epoch: int,
        blocks: tuple[int, int] | None,
        chunk_bytes: int,
        check: Callable[[], None] = _nothing,
    ) -> Generator[Records]:
        """Yield an entry's records in order, in chunks, as they become available. Keeps the entry `opened`.

        blocks: first, count; None: all. check: called while waiting, and may raise. Raises SourceError, and
        MalformedManifest for blocks that do not exist.
        """
        with self.opened(request_id, epoch) as entry:
            first, count = blocks or (0, entry.num_blocks)
            if not 0 < count <= entry.num_blocks - first:
                raise MalformedManifest(
                    f"blocks {first} to {first + count} of request {request_id!r} are wanted;"
                    f" {entry.num_blocks} are here"
                )
            view, what = entry.view, f"KV of request {request_id!r}"

            def look() -> None:
                if entry.ended and (entry.growing or entry.filled < entry.num_blocks):  # the rest never comes
                    raise self._fate(request_id, epoch)
                check()

            most = windows.at_once(chunk_bytes // entry.record_bytes, entry.slots, entry.num_blocks)
            for at, stop in view.pieces(first, first + count, most):
                while at < stop:
                    end = view.wait(at, stop, what, look)
                    yield Records(at, view.records(at, end), view.digests(at, end))
                    at = end  # noqa: PLW2901

    def is_growing(self, request_id: str, epoch: int) -> bool:
        entry = self._entries.get((request_id, epoch))
        return entry is not None and entry.growing

    def take(
        self, request_id: str, epoch: int, taken: int, wanted: int = 0, reader: tuple[int, int] = (0, 1)
    ) -> None:
        """Acknowledge all records before `taken`; records before `wanted` need no slots. Idempotent.

        reader: the calling rank, and how many ranks pull: slots are reused once all have taken their records.
        Raises UnknownHandoff, LeaseExpired, and MalformedManifest for an entry without a window, a smaller
        number than before, or records that were not readable yet.
        """
        with self._changed:
            entry = self._entries.get((request_id, epoch))
            if entry is None:
                raise self._fate(request_id, epoch)
            before, _ = entry.taken_by.get(reader[0], (0, 0))
            fits = entry.windowed and before <= taken <= entry.filled and wanted <= entry.num_blocks
            if not fits or not (taken == before or entry.view.is_whole(taken - 1)):
                raise MalformedManifest(
                    f"{_what(request_id, epoch)}: {taken} records cannot be acknowledged, wanted from"
                    f" {wanted} on; {before} were before, and up to {entry.filled} of {entry.num_blocks} are"
                    f" in its {entry.slots} slots"
                )
            entry.take(taken, wanted, reader)
        self.on_room()

    def release(self, request_id: str, epoch: int, reader: tuple[int, int] = (0, 1)) -> bool:
        """End a lease. Return False if there is none.

        reader: the releasing rank, and how many ranks pull: the last rank's release ends the lease. Until
        then, no slot is kept for records that this rank has not taken.
        """
        with self._changed:
            entry = self._entries.get((request_id, epoch))
            if entry is None:
                return False
            entry.had_by.add(reader[0])
            ended = len(entry.had_by) >= reader[1]
            if ended:
                self._end(entry, UnknownHandoff)
            else:
                entry.take(entry.taken_by.get(reader[0], (0, 0))[0], entry.num_blocks, reader)
        if ended:
            self._tell_end(request_id, epoch)
        elif entry.windowed:
            self.on_room()
        return True

    def renew(self, keys: Iterable[Key]) -> list[Key]:
        """Renew these leases. Return the keys without a lease."""
        with self._changed:
            expires_at, gone = time.monotonic() + self.lease_s, []
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    gone.append(key)
                else:
                    entry.expires_at = expires_at
            return gone

    @property
    def free_blocks(self) -> int:
        return self._arena.free_slots

    @property
    def record_bytes(self) -> int:
        return self._arena.record_bytes

    @property
    def capacity(self) -> int:
        return self._arena.slots

    @property
    def capacity_bytes(self) -> int:
        return self._arena.slots * self._arena.record_bytes

    def held(self) -> tuple[int, int]:
        """Return the number of entries under a lease, and the bytes of their slots."""
        with self._changed:
            entries = list(self._entries.values())
        return len(entries), sum(entry.slots * entry.record_bytes for entry in entries)

    def overdue_s(self) -> float:
        """Return how long the oldest save, even if read or renewed, has outlived one lease; at least 0."""
        with self._changed:
            oldest = next(iter(self._pinned), None)
            return max(0.0, time.monotonic() - oldest.published_at - self.lease_s) if oldest else 0.0

    def close(self) -> None:
        """End every lease and remove the memory. Idempotent."""
        with self._changed:
            self._closed = True
            ended = list(self._entries.values())
            for entry in ended:
                self._end(entry, UnknownHandoff)
            self._changed.notify()
        for entry in ended:
            self._tell_end(*entry.key)
        self._reaper.join(timeout=5)
        self._arena.close()

    def _written(self, entry: Entry, complete: bool) -> None:
        """End a Fill. A windowed save that failed is released, because nothing will fill the rest."""
        self._left(entry)
        if entry.windowed and not complete and self._entries.get(entry.key) is entry:
            self.release(*entry.key)

    def _tell_end(self, request_id: str, epoch: int) -> None:
        self._on_end(request_id, epoch)
        self.on_room()

    def _left(self, entry: Entry) -> None:
        with self._changed:
            entry.readers -= 1
            self._free_if_done(entry)

    def _end(self, entry: Entry, fate: type[HandoffError]) -> None:
        del self._entries[entry.key]
        self._fates[entry.key] = fate
        while len(self._fates) > _REMEMBERED:
            self._fates.popitem(last=False)
        self._abandon(entry)

    def _abandon(self, entry: Entry) -> None:
        entry.ended = True
        entry.view.sign(0)
        self._free_if_done(entry)

    def _free_if_done(self, entry: Entry) -> None:
        if entry.ended and entry.readers == 0:
            self._pinned.pop(entry, None)
            self._arena.free(entry.place)

    def _fate(self, request_id: str, epoch: int) -> HandoffError:
        what, fate = _what(request_id, epoch), self._fates.get((request_id, epoch))
        if fate is LeaseExpired:
            return LeaseExpired(f"{what}: it was not pulled within its lease of {self.lease_s:g} s")
        return UnknownHandoff(f"{what}: {'was released here' if fate else 'was never saved here'}")

    def _reap(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                expired = [entry for entry in self._entries.values() if entry.expires_at <= now]
                for entry in expired:
                    self._end(entry, LeaseExpired)
                if not expired:
                    soonest = min((entry.expires_at for entry in self._entries.values()), default=None)
                    self._changed.wait(None if soonest is None else soonest - now)
            for entry in expired:
                logger.info(
                    "the lease of %s expired", _what(*entry.key), extra={"request_id": entry.request_id}
                )
                self._tell_end(*entry.key)


def _what(request_id: str, epoch: int) -> str:
    return f"KV of request {request_id!r}, epoch {epoch}"
