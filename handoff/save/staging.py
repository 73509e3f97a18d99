"""Saved KV on its way: kept in shared memory under a lease until pulled, given up, or out of time.

A life: `reserve`, `filling` (by a `Fill`, at once or while the lease runs), `publish` (the lease begins),
then `opened` by pulls, its lease renewed for as long as somebody wants it, and one end: `release` or expiry.
Every method may be called from any thread; a
thread of its own ends leases, so they run out with an idle engine as well. How it all lies in memory:
views.py.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from baton.handoff import digests
from baton.handoff.digests import Digests
from baton.handoff.errors import HandoffError, LeaseExpired, StaleEpoch, UnknownHandoff
from baton.handoff.memory.arena import Arena, Place
from baton.handoff.memory.views import View

logger = logging.getLogger(__name__)

_REMEMBERED = 4096  # ended entries whose fate is still told by name
Key = tuple[str, int]  # request id, epoch


@dataclass(eq=False)
class Entry:
    """One saved prompt of one rank."""

    request_id: str
    epoch: int
    place: Place = field(repr=False)
    num_blocks: int
    expires_at: float = float("inf")  # CLOCK_MONOTONIC, seconds
    readers: int = 0  # and its Fill
    ended: bool = False

    @property
    def key(self) -> Key:
        return self.request_id, self.epoch

    @property
    def record_bytes(self) -> int:
        return self.place.record_bytes

    @functools.cached_property
    def view(self) -> View:
        return self.place.view()


class Fill:
    """How an entry gets its records, in order; from one thread at a time, `close` last and once.

    Until then the entry's memory stays, even if its lease ends.
    """

    def __init__(self, staging: Staging, entry: Entry) -> None:
        self._staging = staging
        self._entry = entry
        self._seed = digests.seed(*entry.key)
        self.view = entry.view  # whose records are to be written
        self.whole = 0

    def add(self, own: Digests) -> None:
        """The next len(own) records are written. own: their digests without a seed."""
        self.view.arrived(self.whole, digests.seeded(own, self._seed, self.whole))
        self.whole += len(own)

    def close(self) -> None:
        """No more comes. Readers of an entry that is not whole are told."""
        if self.whole < self._entry.num_blocks:
            self.view.fail()
        self._staging.filled(self._entry)


@dataclass
class StagingCounters:
    """Since the start."""

    published: int = 0
    released: int = 0
    expired: int = 0


class Staging:
    """What one rank has saved. Bounded by its arena."""

    def __init__(self, arena: Arena, lease_s: float) -> None:
        self.lease_s = lease_s
        self.counters = StagingCounters()
        self._arena = arena
        self._entries: dict[Key, Entry] = {}
        self._epochs: dict[str, int] = {}  # request id: its one epoch in _entries
        self._fates: OrderedDict[Key, type[HandoffError]] = OrderedDict()
        self._deadlines: list[tuple[float, int, Entry]] = []  # heap
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._reaper = threading.Thread(target=self._reap, name="baton-leases", daemon=True)
        self._reaper.start()

    def reserve(self, request_id: str, epoch: int, num_blocks: int) -> Entry:
        """Room for a save, not yet visible to anybody. Raises StagingFull."""
        entry = Entry(request_id, epoch, self._arena.allocate(num_blocks), num_blocks)
        entry.view.expect()
        return entry

    def filling(self, entry: Entry) -> Fill:
        """Begin to write a reserved entry's records."""
        with self._changed:
            entry.readers += 1
        return Fill(self, entry)

    def filled(self, entry: Entry) -> None:
        """Nobody writes it any more. Called by its Fill."""
        with self._changed:
            entry.readers -= 1
            self._free_if_done(entry)

    def publish(self, entry: Entry) -> None:
        """The records are there, or on their way: begin the lease. An older epoch of the request ends here.

        Raises StaleEpoch, and frees the entry, when a later epoch of the request is here already.
        """
        with self._changed:
            known = self._epochs.get(entry.request_id)
            if known is not None and known > entry.epoch:
                self._abandon(entry)
                raise StaleEpoch(f"save of {_what(*entry.key)}: epoch {known} of that request is saved here")
            if known is not None:
                self._end(self._entries[entry.request_id, known], StaleEpoch)
            entry.view.sign(digests.seed(*entry.key))
            entry.expires_at = time.monotonic() + self.lease_s
            self._entries[entry.key] = entry
            self._epochs[entry.request_id] = entry.epoch
            self.counters.published += 1
            heapq.heappush(self._deadlines, (entry.expires_at, next(self._order), entry))
            self._changed.notify()

    def discard(self, entry: Entry) -> None:
        """Give up an entry that was reserved and never published."""
        with self._changed:
            self._abandon(entry)

    @contextlib.contextmanager
    def opened(self, request_id: str, epoch: int) -> Iterator[Entry]:
        """Read an entry; its memory is not used again before the block ends, even if its lease does.

        Raises UnknownHandoff, LeaseExpired, StaleEpoch.
        """
        with self._changed:
            entry = self._entries.get((request_id, epoch))
            if entry is None:
                raise self._fate(request_id, epoch)
            entry.readers += 1
        try:
            yield entry
        finally:
            with self._changed:
                entry.readers -= 1
                self._free_if_done(entry)

    def release(self, request_id: str, epoch: int) -> bool:
        """End a lease. False: it had ended before, or never begun."""
        with self._changed:
            entry = self._entries.get((request_id, epoch))
            if entry is None:
                return False
            self.counters.released += 1
            self._end(entry, UnknownHandoff)
            return True

    def renew(self, keys: Iterable[Key]) -> list[Key]:
        """Begin these leases anew. Returns what is here no more."""
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
    def capacity(self) -> int:
        """Blocks for which there would be room if nothing were saved."""
        return self._arena.slots

    @property
    def capacity_bytes(self) -> int:
        """Of these blocks."""
        return self._arena.slots * self._arena.record_bytes

    def held(self) -> tuple[int, int]:
        """Saved prompts under a lease, and their bytes."""
        with self._changed:
            entries = list(self._entries.values())
        return len(entries), sum(entry.num_blocks * entry.record_bytes for entry in entries)

    def close(self) -> None:
        """End every lease and remove the memory. Idempotent."""
        with self._changed:
            self._closed = True
            for entry in list(self._entries.values()):
                self._end(entry, UnknownHandoff)
            self._changed.notify()
        self._reaper.join(timeout=5)
        self._arena.close()

    def _end(self, entry: Entry, fate: type[HandoffError]) -> None:
        del self._entries[entry.key]
        del self._epochs[entry.request_id]
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
            self._arena.free(entry.place)

    def _fate(self, request_id: str, epoch: int) -> HandoffError:
        what = _what(request_id, epoch)
        known = self._epochs.get(request_id)
        if known is not None:
            return StaleEpoch(f"{what}: here it is epoch {known}")
        fate = self._fates.get((request_id, epoch))
        if fate is LeaseExpired:
            return LeaseExpired(f"{what}: nobody pulled it within its lease of {self.lease_s:g} s")
        return UnknownHandoff(f"{what}: {'was released here' if fate else 'was never saved here'}")

    def _reap(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                while self._deadlines and (self._deadlines[0][2].ended or self._deadlines[0][0] <= now):
                    entry = heapq.heappop(self._deadlines)[2]
                    if not entry.ended and entry.expires_at > now:  # renewed
                        heapq.heappush(self._deadlines, (entry.expires_at, next(self._order), entry))
                    elif not entry.ended:
                        logger.info("the lease of %s ran out unpulled", _what(*entry.key))
                        self.counters.expired += 1
                        self._end(entry, LeaseExpired)
                self._changed.wait(self._deadlines[0][0] - now if self._deadlines else None)


def _what(request_id: str, epoch: int) -> str:
    return f"KV of request {request_id!r}, epoch {epoch}"
