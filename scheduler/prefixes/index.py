"""Blocks -> the workers that hold them.

A worker is one bit of an integer, and equal integers are one object, so a block costs one entry of a
dictionary however many workers hold it. The dictionary is split into shards: one that grows, or is swept,
holds the event loop up for its own size alone.

A prompt's blocks form a chain, and engines evict a chain from its end: a worker that holds one block holds
those before it. So the end of what it holds is found in steps that are halved, in O(log blocks) look-ups.
Where that is not true for a moment, the answer is a block that it holds, or nothing.

A worker that is gone, or begins anew, costs O(1): its bit is masked out, and swept away later, piece by
piece, once a quarter of all that is stored is of such workers. So its cost is that of its own blocks.

A shard that is full keeps only blocks at every second depth, then every fourth, and so on: what is known of
long prompts gets coarser, and short ones are forgotten first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

SHARDS = 256
REMOVED = 1 << 63  # set in an operation that takes a block away
_SHARD_SHIFT = 4  # the lowest bits are a block's level: shards would be of uneven size
_LEVELS = 0xF
_MOST_SETS = 65_536  # different sets of workers that are kept as one object each
_SWEPT_SHARE = 4  # sweep when one of so many entries may be of workers that are gone
_SWEPT_SLOTS = 64  # or when so many of them are gone


class PrefixIndex:
    """The index. Used in one event loop; no method gives it up."""

    def __init__(self, most: int) -> None:
        """Keep at most about `most` blocks, at least one a shard."""
        self._most = max(1, most // SHARDS)  # of a shard
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._floors = [0] * SHARDS  # the lowest level that a shard keeps
        self._bits: list[int] = []  # by slot: its bit; one object each
        self._free: list[int] = []
        self._stored: dict[int, int] = {}  # by slot in use: blocks that it stored and did not take away
        self._alive = 0  # the bits of slots in use
        self._gone = 0  # bits to be swept away
        self._gone_stored = 0  # what they stored
        self._sweeping = 0  # the bits of `_gone` of the sweep under way
        self._next = 0  # the shard that is swept next
        self._sets: dict[int, int] = {}  # set of workers -> the one object for it

    def __len__(self) -> int:
        """Return the number of blocks."""
        return sum(map(len, self._shards))

    @property
    def coarseness(self) -> int:
        """The distance, in blocks, of those that are kept where the index is fullest; 1: all are."""
        return 1 << max(self._floors)

    @property
    def alive(self) -> int:
        """The bits of all workers that are in the index."""
        return self._alive

    def join(self) -> int:
        """Return a slot for a worker that holds nothing so far."""
        slot = self._free.pop() if self._free else len(self._bits)
        if slot == len(self._bits):
            self._bits.append(1 << slot)
        self._alive |= self._bits[slot]
        self._stored[slot] = 0
        return slot

    def leave(self, slot: int) -> None:
        """Forget all that the worker of this slot holds."""
        self._alive &= ~self._bits[slot]
        self._gone |= self._bits[slot]
        self._gone_stored += self._stored.pop(slot)

    def apply(self, slot: int, operations: Iterable[int]) -> None:
        """Store and take away blocks of a worker, in this order. Twice does no harm."""
        shards, floors, bit = self._shards, self._floors, self._bits[slot]
        count = 0
        for operation in operations:
            number = operation >> _SHARD_SHIFT & (SHARDS - 1)
            shard = shards[number]
            if operation & REMOVED:
                count -= self._remove(shard, operation ^ REMOVED, bit)
                self._refine(number)
                continue
            if operation & _LEVELS < floors[number]:
                continue
            held = shard.get(operation)
            if held is None:
                shard[operation] = bit
                count += 1
                if len(shard) > self._most:
                    self._thin(number)
            elif not held & bit:
                shard[operation] = self._one(held | bit)
                count += 1
        self._stored[slot] += count

    def holders(self, key: int) -> int:
        """Return the bits of the workers that hold a block."""
        return self._shards[key >> _SHARD_SHIFT & (SHARDS - 1)].get(key, 0) & self._alive

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
        while entries > 0 and self._next < SHARDS:
            entries -= len(self._shards[self._next]) + 1
            self._sweep(self._next)
            self._next += 1
        if self._next < SHARDS:
            return True
        self._free += slots_of(self._sweeping)
        self._gone &= ~self._sweeping
        self._sweeping = 0
        self._sets = {}
        return self._begin_sweep()

    def _begin_sweep(self) -> bool:
        many = self._gone.bit_count() >= _SWEPT_SLOTS
        if not self._gone or not (many or self._gone_stored * _SWEPT_SHARE >= len(self)):
            return False
        self._sweeping, self._gone_stored, self._next = self._gone, 0, 0
        return True

    def _sweep(self, number: int) -> None:
        shard, kept = self._shards[number], ~self._sweeping
        for key in [key for key, held in shard.items() if held & self._sweeping]:
            if left := shard[key] & kept:
                shard[key] = self._one(left)
            else:
                del shard[key]
        self._refine(number)

    def _refine(self, number: int) -> None:
        """Take in blocks of a lower level again, where a shard has much room."""
        if self._floors[number] and len(self._shards[number]) < self._most // 4:
            self._floors[number] -= 1

    def _thin(self, number: int) -> None:
        """Keep the blocks of higher levels alone. One level is half of the blocks, so this is rare."""
        floor = self._floors[number] = self._floors[number] + 1
        self._shards[number] = {
            key: held for key, held in self._shards[number].items() if key & _LEVELS >= floor
        }

    def _remove(self, shard: dict[int, int], key: int, bit: int) -> int:
        held = shard.get(key, 0)
        if not held & bit:
            return 0
        if left := held & ~bit:
            shard[key] = self._one(left)
        else:
            del shard[key]
        return 1

    def _one(self, bits: int) -> int:
        """Return the one object for a set of workers."""
        if len(self._sets) > _MOST_SETS:
            self._sets = {}
        return self._sets.setdefault(bits, bits)


def slots_of(bits: int) -> Iterator[int]:
    """Yield the slots of a set of workers, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
