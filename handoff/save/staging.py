"""Saved KV on its way: kept in shared memory under a lease until pulled, given up, or out of time.

An entry's life: `reserve`; `filling` (by one `Fill`, or by one for each step that computes a part of the
prompt); `publish`, which begins the lease; then pulls `read` it, and renewals keep the lease for as long as
somebody wants the KV; one end, `release` or expiry. Any thread may call any method. A thread of its own ends
leases, so that they run out with an idle engine as well. memory/views.py describes how it all lies in memory.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from baton.handoff import digests
from baton.handoff.errors import HandoffError, LeaseExpired, MalformedManifest, UnknownHandoff
from baton.handoff.memory.arena import Arena, StagingSlots
from baton.handoff.memory.fill import Fill
from baton.handoff.memory.views import SaveView
from baton.handoff.records import Records
from baton.handoff.tickets import Tickets

logger = logging.getLogger(__name__)

_REMEMBERED = 4096  # ended entries of which a late pull still learns how they ended
Key = tuple[str, int]  # request id, epoch


@dataclass(eq=False)
class Entry:
    """One saved prompt of one rank."""

    request_id: str
    epoch: int
    place: StagingSlots = field(repr=False)
    num_blocks: int
    published_at: float = float("inf")  # CLOCK_MONOTONIC, seconds
    expires_at: float = float("inf")  # the same
    readers: int = 0  # pulls under way, and Fills
    growing: bool = False  # its prompt is still computed: further fills will come
    ended: bool = False
    had_by: set[int] = field(default_factory=set, repr=False)  # of several ranks that pull it

    @property
    def key(self) -> Key:
        """Request id and epoch."""
        return self.request_id, self.epoch

    @property
    def record_bytes(self) -> int:
        """Bytes of one block's record."""
        return self.place.record_bytes

    @functools.cached_property
    def view(self) -> SaveView:
        """The entry's headers and records."""
        return self.place.view()


def _nothing(*_: object) -> None:
    """Do nothing."""


class Staging:
    """The saved prompts of one rank, bounded by its arena."""

    def __init__(self, arena: Arena, lease_s: float, ended: Callable[[str, int], None] = _nothing) -> None:
        """Start with nothing saved.

        ended: called, without a lock, with the key of each published entry that ends.
        """
        self.lease_s = lease_s
        self.tickets = Tickets()
        self._arena = arena
        self._on_end = ended
        self._entries: dict[Key, Entry] = {}
        self._pinned: dict[Entry, None] = {}  # published, in that order, and their memory is not free
        self._fates: OrderedDict[Key, type[HandoffError]] = OrderedDict()
        self._deadlines: list[tuple[float, int, Entry]] = []  # heap
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._reaper = threading.Thread(target=self._reap, name="baton-leases", daemon=True)
        self._reaper.start()

    def reserve(self, request_id: str, epoch: int, num_blocks: int) -> Entry:
        """Return room for a save, visible to nobody yet. Raises StagingFull."""
        entry = Entry(request_id, epoch, self._arena.allocate(num_blocks), num_blocks)
        entry.view.expect()
        return entry

    def filling(self, entry: Entry, first: int = 0, stop: int | None = None) -> Fill:
        """Begin to write a reserved entry's records from `first` to `stop`, all by default.

        Raises UnknownHandoff, LeaseExpired for an entry that has ended.
        """
        with self._changed:
            if entry.ended:
                raise self._fate(*entry.key)
            entry.readers += 1
        return Fill(entry.view, digests.seed(*entry.key), lambda: self._left(entry), first, stop)

    def publish(self, entry: Entry, *, growing: bool = False) -> None:
        """Begin the lease of an entry whose records are there or coming. An older one of its key ends.

        growing: further fills will come, the last one before `grown`.
        """
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
            heapq.heappush(self._deadlines, (entry.expires_at, next(self._order), entry))
            self._changed.notify()
        if older is not None:
            self._on_end(*entry.key)

    def grown(self, entry: Entry) -> None:
        """Note that all fills of an entry have begun."""
        entry.growing = False

    def discard(self, entry: Entry) -> None:
        """Give up an entry that was reserved and never published."""
        with self._changed:
            self._abandon(entry)

    @contextlib.contextmanager
    def opened(self, request_id: str, epoch: int) -> Iterator[Entry]:
        """Hold an entry: its memory is not reused before the block ends, even if its lease does.

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
    ) -> Iterator[Records]:
        """Yield an entry's records in order, chunk by chunk, each as soon as it is whole.

        blocks: the first, and how many; None: all. check: called while a chunk is waited for, and may raise.
        The entry is held until the iteration ends. Raises UnknownHandoff, LeaseExpired, MalformedManifest for
        blocks that it does not have, SaveFailed.
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
                if entry.ended and entry.growing:  # nobody will write the rest
                    raise self._fate(request_id, epoch)
                check()

            for at, stop in view.pieces(first, first + count, max(1, chunk_bytes // entry.record_bytes)):
                while at < stop:
                    end = view.wait(at, stop, what, look)
                    yield Records(at, view.records(at, end), view.digests(at, end))
                    at = end  # noqa: PLW2901

    def is_growing(self, request_id: str, epoch: int) -> bool:
        """Return whether the entry's prompt is still computed."""
        entry = self._entries.get((request_id, epoch))
        return entry is not None and entry.growing

    def release(self, request_id: str, epoch: int, reader: tuple[int, int] = (0, 1)) -> bool:
        """End a lease. Returns False for one that had ended before, or never begun.

        reader: the rank that has pulled it, and how many will: the lease ends with the last one's release.
        """
        with self._changed:
            entry = self._entries.get((request_id, epoch))
            if entry is None:
                return False
            entry.had_by.add(reader[0])
            if len(entry.had_by) < reader[1]:
                return True
            self._end(entry, UnknownHandoff)
        self._on_end(request_id, epoch)
        return True

    def renew(self, keys: Iterable[Key]) -> list[Key]:
        """Begin these leases anew. Returns the keys of entries that are gone."""
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
        """Blocks for which there is room."""
        return self._arena.free_slots

    @property
    def record_bytes(self) -> int:
        """Bytes of one block's record."""
        return self._arena.record_bytes

    @property
    def capacity(self) -> int:
        """Blocks for which there would be room if nothing were saved."""
        return self._arena.slots

    @property
    def capacity_bytes(self) -> int:
        """Bytes of KV for which there would be room if nothing were saved."""
        return self._arena.slots * self._arena.record_bytes

    def held(self) -> tuple[int, int]:
        """Return the number of saved prompts under a lease, and their bytes."""
        with self._changed:
            entries = list(self._entries.values())
        return len(entries), sum(entry.num_blocks * entry.record_bytes for entry in entries)

    def overdue_s(self) -> float:
        """Return how much older than one lease the oldest save is whose memory is not free; at least 0.

        Renewals make one older, for as long as somebody wants it; so do readers that do not end.
        """
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
            self._on_end(*entry.key)
        self._reaper.join(timeout=5)
        self._arena.close()

    def _left(self, entry: Entry) -> None:
        """Note that a reader, or the Fill, is through with an entry."""
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
            return LeaseExpired(f"{what}: nobody pulled it within its lease of {self.lease_s:g} s")
        return UnknownHandoff(f"{what}: {'was released here' if fate else 'was never saved here'}")

    def _reap(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                expired = self._expire(time.monotonic())
                if not expired:
                    next_s = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
                    self._changed.wait(next_s)
            for entry in expired:
                logger.info(
                    "the lease of %s ran out unpulled",
                    _what(*entry.key),
                    extra={"request_id": entry.request_id},
                )
                self._on_end(*entry.key)

    def _expire(self, now: float) -> list[Entry]:
        """End the leases that have run out; returns their entries."""
        expired = []
        while self._deadlines and (self._deadlines[0][2].ended or self._deadlines[0][0] <= now):
            entry = heapq.heappop(self._deadlines)[2]
            if not entry.ended and entry.expires_at > now:  # renewed
                heapq.heappush(self._deadlines, (entry.expires_at, next(self._order), entry))
            elif not entry.ended:
                self._end(entry, LeaseExpired)
                expired.append(entry)
        return expired


def _what(request_id: str, epoch: int) -> str:
    return f"KV of request {request_id!r}, epoch {epoch}"
