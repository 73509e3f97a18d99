"""The numbers of saves with fewer slots than records: how large a window is, and in which parts it moves.

A window is filled, pulled and said to be taken in parts. What is pulled counts as taken when the next part is
asked for, as its memory is looked at once more then; and it is told when a part has come together. So the
slots of two parts wait at most, and the others are filled meanwhile.
"""

from __future__ import annotations

WHOLE_SHARE = 2  # a save that takes more than this part of staging gets a window
WINDOW_SHARE = 4  # of this part of staging
PARTS = 4  # of a window
LEAST = 2  # slots: one that is pulled, and one that is filled


def slots_for(records: int, capacity: int) -> int:
    """Return how many slots a save of so many records gets in staging of `capacity` slots."""
    if records * WHOLE_SHARE <= capacity:
        return records
    return min(records, max(LEAST, capacity // WINDOW_SHARE))


def part(slots: int) -> int:
    """Return how many records are moved at once in a window of so many slots."""
    return max(1, slots // PARTS)


def at_once(records: int, slots: int, saved: int) -> int:
    """Return how many of a save's records to pull at once: as many as fit, but no more than a window's part.

    records: that fit; slots: of the save; saved: its records.
    """
    return max(1, records if slots >= saved else min(records, part(slots)))
