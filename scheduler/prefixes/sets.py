"""Number sets of workers: equal sets share a number, so a block's holders take a few bits.

A worker is a bit of an integer, at the place of its slot. The number of a one-worker set follows from its
slot. Larger sets are numbered as they come, and a number is free again when nothing refers to it. Their count
is bounded: chains of blocks on the same workers share one, so there are far fewer sets than blocks.
"""

from __future__ import annotations

from array import array

NUMBER_BITS = 20
MOST_SHARED = 1 << 18  # sets of several workers; some 300 bytes each with 1,000 workers


def alone(slot: int) -> int:
    """Return the number of the set of one worker."""
    return MOST_SHARED + slot


class WorkerSets:
    """Hold the sets that are referred to. References to one-worker sets are not counted."""

    def __init__(self) -> None:
        self._bits: list[int] = []  # indexed by number, like the next two
        self._references = array("Q")
        self._free: list[int] = []
        self._numbers: dict[int, int] = {}  # bits -> number

    def __len__(self) -> int:
        """Return the number of sets of several workers."""
        return len(self._numbers)

    def bits(self, number: int) -> int:
        """Return the workers of a set."""
        return self._bits[number] if number < MOST_SHARED else 1 << (number - MOST_SHARED)

    def refer(self, bits: int, times: int = 1) -> int | None:
        """Add `times` references to a set and return its number; None if there are too many sets.

        The set must not be empty.
        """
        if not bits & (bits - 1):
            return alone(bits.bit_length() - 1)
        number = self._numbers.get(bits)
        if number is None:
            if len(self._numbers) >= MOST_SHARED:
                return None
            number = self._numbers[bits] = self._new(bits)
        self._references[number] += times
        return number

    def release(self, number: int, times: int = 1) -> None:
        """Remove `times` references to a set."""
        if number >= MOST_SHARED:
            return
        self._references[number] -= times
        if not self._references[number]:
            del self._numbers[self._bits[number]]
            self._bits[number] = 0
            self._free.append(number)

    def _new(self, bits: int) -> int:
        if self._free:
            number = self._free.pop()
            self._bits[number] = bits
            return number
        self._bits.append(bits)
        self._references.append(0)
        return len(self._bits) - 1
