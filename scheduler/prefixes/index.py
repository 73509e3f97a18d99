"""Map KV blocks to the workers that hold them.

An entry has 64 bits: 44 of a block's key, and the number of the set of workers that hold it (sets.py). The
rest of the key selects a shard, a sorted array of a few hundred entries. So a block takes some 10 bytes,
however many workers hold it, and no call has to rebuild anything. One look-up in a billion finds the
wrong block; the request is then merely placed less well.

Engines evict a prompt's chain of blocks from its end, so a binary search finds the last one that a worker
holds.

Removing or resetting a worker costs O(1): its bit is masked out. A sweep removes such bits in pieces, once a
quarter of the entries may have one.

A full shard keeps only the blocks at every second depth, then every fourth and so on: long prompts are
matched more coarsely, and short ones are forgotten.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from baton.prefix_keys import REMOVED
from baton.scheduler.prefixes.sets import MOST_SHARED, NUMBER_BITS, WorkerSets, alone

MOST_BLOCKS = 64_000_000  # some 12 bytes each
MOST_SLOTS = (1 << NUMBER_BITS) - MOST_SHARED  # workers, including removed ones that are not swept yet
_NUMBER = (1 << NUMBER_BITS) - 1  # mask of the set's number in an entry
_NAME_BITS = 64 - NUMBER_BITS
NAME = (1 << _NAME_BITS) - 1  # mask of an entry's part of a key
_LEVELS = 0xF  # mask of the level in a key
_SHARD = 512  # maximum entries of a shard, if `_MOST_SHARDS` are enough for that
_MOST_SHARDS = 1 << 16  # a key has 60 bits, an entry 44 of them
_SWEPT_SHARE = 4  # sweep when 1 in this many entries may belong to removed workers
_SWEPT_SLOTS = 64  # or when this many workers were removed
_EMPTY = array("Q")  # shared by all empty shards, and never changed: a new index takes no time


class PrefixIndex:
    """The index. Belongs to one event loop."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        """Keep at most `most` blocks, but at least one per shard."""
        count = min(_MOST_SHARDS, 1 << (most // _SHARD).bit_length())
        self._mask = count - 1
        self._most = max(1, most // count)  # per shard
        self._shards = [_EMPTY] * count
        self._floors = bytearray(count)  # lowest level that each shard keeps
        self._at_floor = [count] + [0] * (_LEVELS + 1)  # number of shards by floor
        self._entries = 0
        self.sets = WorkerSets()
        self._slots = 0  # slots ever used
        self._free: list[int] = []
        self._stored: dict[int, int] = {}  # slot in use -> blocks held
        self.alive = 0  # bits of the slots in use
        self._gone = 0  # bits of removed workers, to sweep
        self._gone_stored = 0  # number of blocks that the removed workers held
        self._sweeping = 0  # bits of the current sweep
        self._next = 0  # next shard to sweep

    def __len__(self) -> int:
        return self._entries

    @property
    def shards(self) -> int:
        return len(self._shards)

    @property
    def coarseness(self) -> int:
        """The distance between kept blocks in the fullest shard; 1: all are kept."""
        return 1 << max(floor for floor, shards in enumerate(self._at_floor) if shards)

    def join(self) -> int:
        """Return a slot, below MOST_SLOTS, for a new worker."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._slots
            self._slots += 1
        self.alive |= 1 << slot
        self._stored[slot] = 0
        return slot

    def leave(self, slot: int) -> None:
        self.alive &= ~(1 << slot)
        self._gone |= 1 << slot
        self._gone_stored += self._stored.pop(slot)

    def apply(self, slot: int, operations: Iterable[int]) -> None:
        """Add and remove blocks of a worker, in this order. Idempotent."""
        shards, mask, floors, most = self._shards, self._mask, self._floors, self._most
        bit, only = 1 << slot, alone(slot)
        count = 0
        for operation in operations:
            number = operation >> _NAME_BITS & mask
            shard, name = shards[number], operation & NAME
            place = bisect_left(shard, name << NUMBER_BITS)
            there = place < len(shard) and shard[place] >> NUMBER_BITS == name
            if operation & REMOVED:
                if there:
                    count -= self._remove(shard, place, bit)
                if floors[number]:
                    self._refine(number)
            elif there:
                count += self._add(shard, place, bit)
            elif name & _LEVELS >= floors[number]:
                if not shard:
                    shard = shards[number] = array("Q")
                shard.insert(place, name << NUMBER_BITS | only)
                self._entries += 1
                count += 1
                if len(shard) > most:
                    self._thin(number)
        self._stored[slot] += count

    def holders(self, key: int) -> int:
        """Return the bits of the workers that hold a block."""
        shard, name = self._shards[key >> _NAME_BITS & self._mask], key & NAME
        place = bisect_left(shard, name << NUMBER_BITS)
        if place < len(shard) and (entry := shard[place]) >> NUMBER_BITS == name:
            return self.sets.bits(entry & _NUMBER) & self.alive
        return 0

    def reach(self, keys: Sequence[int], among: int) -> tuple[int, int]:
        """Return the length of the longest prefix that a worker holds, and the bits of the workers that do.

        `keys` are a prompt's blocks in order, `among` the bits of the workers to consider. (0, 0): no
        worker holds any block.
        """
        holders = self.holders
        found, who = 0, 0
        step = 1 << max(0, len(keys).bit_length() - 1)
        while step and among:
            if found + step <= len(keys) and (held := holders(keys[found + step - 1]) & among):
                found, who = found + step, held
            step >>= 1
        return found, who

    def tend(self, entries: int) -> bool:
        """Sweep about `entries` entries for removed workers; return whether there is more to do."""
        if not self._sweeping and not self._begin_sweep():
            return False
        while entries > 0 and self._next < len(self._shards):
            entries -= len(self._shards[self._next]) + 1
            self._sweep(self._next)
            self._next += 1
        if self._next < len(self._shards):
            return True
        self._free += slots_of(self._sweeping)
        self._gone &= ~self._sweeping
        self._sweeping = 0
        return self._begin_sweep()

    def _begin_sweep(self) -> bool:
        many = self._gone.bit_count() >= _SWEPT_SLOTS
        if not self._gone or not (many or self._gone_stored * _SWEPT_SHARE >= len(self)):
            return False
        self._sweeping, self._gone_stored, self._next = self._gone, 0, 0
        return True

    def _sweep(self, at: int) -> None:
        shard, sets = self._shards[at], self.sets
        # set's number -> number of the set without removed workers; None: no worker is left
        renamed: dict[int, int | None] = {}
        for number, times in Counter(entry & _NUMBER for entry in shard).items():
            bits = sets.bits(number)
            if bits & self._sweeping:
                left = bits & ~self._sweeping
                renamed[number] = sets.refer(left, times) if left else None
                sets.release(number, times)
        if renamed:
            kept = ((entry, renamed.get(entry & _NUMBER, entry & _NUMBER)) for entry in shard)
            self._replace(at, array("Q", (e & ~_NUMBER | left for e, left in kept if left is not None)))
        self._refine(at)

    def _refine(self, at: int) -> None:
        if self._floors[at] and len(self._shards[at]) < self._most // 4:
            self._set_floor(at, self._floors[at] - 1)

    def _thin(self, at: int) -> None:
        floor = self._floors[at] + 1
        self._set_floor(at, floor)
        shard = self._shards[at]
        low = Counter(e & _NUMBER for e in shard if e >> NUMBER_BITS & _LEVELS < floor)
        for number, times in low.items():
            self.sets.release(number, times)
        self._replace(at, array("Q", (e for e in shard if e >> NUMBER_BITS & _LEVELS >= floor)))

    def _set_floor(self, at: int, floor: int) -> None:
        self._at_floor[self._floors[at]] -= 1
        self._at_floor[floor] += 1
        self._floors[at] = floor

    def _replace(self, at: int, kept: array[int]) -> None:
        self._entries += len(kept) - len(self._shards[at])
        self._shards[at] = kept

    def _add(self, shard: array[int], place: int, bit: int) -> int:
        entry = shard[place]
        held = self.sets.bits(entry & _NUMBER)
        number = None if held & bit else self.sets.refer(held | bit)
        if number is None:
            return 0
        self.sets.release(entry & _NUMBER)
        shard[place] = entry & ~_NUMBER | number
        return 1

    def _remove(self, shard: array[int], place: int, bit: int) -> int:
        """Remove a holder and return 1; return 0 if the worker does not hold the block.

        If there are too many sets, the block is forgotten.
        """
        entry = shard[place]
        held = self.sets.bits(entry & _NUMBER)
        if not held & bit:
            return 0
        left = held & ~bit
        number = self.sets.refer(left) if left else None
        self.sets.release(entry & _NUMBER)
        if number is None:
            del shard[place]
            self._entries -= 1
        else:
            shard[place] = entry & ~_NUMBER | number
        return 1


def slots_of(bits: int) -> Iterator[int]:
    """Yield the slots of a set of workers, lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
