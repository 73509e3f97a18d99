"""Number sets of workers: an entry of the index refers to a set by a few bits.

A set is an integer with the bits of its workers' slots. A set of one worker has a number of its own; larger
sets are numbered as needed. There are far fewer sets than blocks.
"""

from __future__ import annotations

from array import array

NUMBER_BITS = 20
MOST_SHARED = 1 << 18  # sets of several workers; some 300 bytes each with 1,000 workers


def alone(slot: int) -> int:
    """Return the number of the set with this worker alone."""
    return MOST_SHARED + slot


class WorkerSets:
    """The sets in use, with reference counts, except for sets of one worker."""

    def __init__(self) -> None:
        self._bits: list[int] = []  # indexed by number, like the next two
        self._references = array("Q")
        self._free: list[int] = []
        self._numbers: dict[int, int] = {}  # bits -> number

    def __len__(self) -> int:
        return len(self._numbers)

    def bits(self, number: int) -> int:
        return self._bits[number] if number < MOST_SHARED else 1 << (number - MOST_SHARED)

    def refer(self, bits: int, times: int = 1) -> int | None:
        """Add references to a nonempty set; return its number, or None if there are too many sets."""
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
