"""Blocks -> the workers that hold them.

A block is one entry of 64 bits: 44 bits of its name, and the number of the set of workers that hold it
(sets.py). Entries lie in shards, which the rest of the name chooses. Each shard is a sorted array of some
hundred entries: a block is found by bisection, and put in or taken out by moving those behind it. So a block
costs some 10 bytes, however many workers hold it, and no call holds the event loop up to rebuild anything.

What is left out of a name is paid for by chance alone: one look-up in a billion meets another block of its
shard. A request is placed less well then; its answer is never wrong, as engines match whole hashes.

A prompt's blocks form a chain, and engines evict a chain from its end: a worker that holds one block holds
those before it. So the end of what it holds is found in steps that are halved, in O(log blocks) look-ups.
Where that is not true for a moment, the answer is a block that it holds, or nothing.

A worker that is gone, or begins anew, costs O(1): its bit is masked out, and swept away later, piece by
piece, once a quarter of all that is stored is of such workers. So its cost is that of its own blocks.

A shard that is full keeps only blocks at every second depth, then every fourth, and so on: what is known of
long prompts gets coarser, and short ones are forgotten first. Shards do not fill evenly: the fullest ones
begin with it when the index holds some four fifths of what it may.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from baton.prefix_keys import REMOVED
from baton.scheduler.prefixes.sets import MOST_SHARED, NUMBER_BITS, WorkerSets, alone

MOST_BLOCKS = 64_000_000  # some 12 bytes each
MOST_SLOTS = (1 << NUMBER_BITS) - MOST_SHARED  # workers, those that are yet to be swept included
_NUMBER = (1 << NUMBER_BITS) - 1  # of an entry
_NAME_BITS = 64 - NUMBER_BITS
NAME = (1 << _NAME_BITS) - 1  # of an operation
_LEVELS = 0xF  # of a name
_SHARD = 512  # entries of a full one, at most; more where `_MOST_SHARDS` do not suffice
_MOST_SHARDS = 1 << 16  # the name's 60 bits without those of an entry
_SWEPT_SHARE = 4  # sweep when one of so many entries may be of workers that are gone
_SWEPT_SLOTS = 64  # or when so many of them are gone


class PrefixIndex:
    """The index. Used in one event loop; no method gives it up."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        """Keep at most `most` blocks, at least one a shard."""
        count = min(_MOST_SHARDS, 1 << (most // _SHARD).bit_length())
        self._mask = count - 1
        self._most = max(1, most // count)  # of a shard
        self._shards = [array("Q") for _ in range(count)]
        self._floors = bytearray(count)  # the lowest level that a shard keeps
        self._at_floor = [count] + [0] * (_LEVELS + 1)  # shards, by their floor
        self._entries = 0
        self.sets = WorkerSets()
        self._slots = 0  # that were ever in use
        self._free: list[int] = []
        self._stored: dict[int, int] = {}  # by slot in use: blocks that it stored and did not take away
        self._alive = 0  # the bits of slots in use
        self._gone = 0  # bits to be swept away
        self._gone_stored = 0  # what they stored
        self._sweeping = 0  # the bits of `_gone` of the sweep under way
        self._next = 0  # the shard that is swept next

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._entries

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self._shards)

    @property
    def coarseness(self) -> int:
        """The distance, in blocks, of those that are kept where the index is fullest; 1: all are."""
        return 1 << max(floor for floor, shards in enumerate(self._at_floor) if shards)

    @property
    def alive(self) -> int:
        """The bits of all workers that are in the index."""
        return self._alive

    def join(self) -> int:
        """Return a slot, below MOST_SLOTS, for a worker that holds nothing so far."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._slots
            self._slots += 1
        self._alive |= 1 << slot
        self._stored[slot] = 0
        return slot

    def leave(self, slot: int) -> None:
        """Forget all that the worker of this slot holds."""
        self._alive &= ~(1 << slot)
        self._gone |= 1 << slot
        self._gone_stored += self._stored.pop(slot)

    def apply(self, slot: int, operations: Iterable[int]) -> None:
        """Store and take away blocks of a worker, in this order. Twice does no harm."""
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
            return self.sets.bits(entry & _NUMBER) & self._alive
        return 0

    def reach(self, keys: Sequence[int], among: int) -> tuple[int, int]:
        """Return how many of `keys`, a prompt's blocks in order, one of `among` holds, and who holds so many.

        `among` are bits of workers; the answer is the longest one. (0, 0): none of them holds the first.
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
        """Sweep about so many entries, where workers are gone; return whether there is more to do.

        Called again and again; never holds the event loop for more than those, and a shard's worth.
        """
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
        renamed: dict[int, int | None] = {}  # number of a set -> of what is left of it, None: nothing
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
        """Take in blocks of a lower level again, where a shard has much room."""
        if self._floors[at] and len(self._shards[at]) < self._most // 4:
            self._set_floor(at, self._floors[at] - 1)

    def _thin(self, at: int) -> None:
        """Keep the blocks of higher levels alone. One level is half of the blocks, so this is rare."""
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
        """Note one holder more, and return 1; 0 if it is known, or there are too many sets of workers."""
        entry = shard[place]
        held = self.sets.bits(entry & _NUMBER)
        number = None if held & bit else self.sets.refer(held | bit)
        if number is None:
            return 0
        self.sets.release(entry & _NUMBER)
        shard[place] = entry & ~_NUMBER | number
        return 1

    def _remove(self, shard: array[int], place: int, bit: int) -> int:
        """Note one holder less, and return 1; 0 if it is none.

        Where there are too many sets of workers, the block is forgotten.
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
    """Yield the slots of a set of workers, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
