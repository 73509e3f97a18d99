"""Size the windows of saves with fewer slots than records, and the parts in which they move.

A window is filled, pulled and acknowledged in parts. Pulled records count as taken when the next part is
asked for, because their memory is checked once more then; and that is reported once a whole part has been
taken. So at most the slots of two parts wait, and the others are filled meanwhile.
"""

from __future__ import annotations

WHOLE_SHARE = 2  # a save that takes more than 1/n of staging gets a window
WINDOW_SHARE = 4  # 1/n of staging for that window
PARTS = 4  # parts per window
LEAST = 2  # slots: one being pulled, and one being filled


def slots_for(records: int, capacity: int) -> int:
    """Return how many slots a save of `records` records gets in staging of `capacity` slots."""
    if records * WHOLE_SHARE <= capacity:
        return records
    return min(records, max(LEAST, capacity // WINDOW_SHARE))


def part(slots: int) -> int:
    """Return how many records are moved at once in a window of `slots` slots."""
    return max(1, slots // PARTS)


def at_once(records: int, slots: int, saved: int) -> int:
    """Return how many of a save's records to pull at once: as many as fit, but at most a window's part.

    records: number that fits; slots: of the save; saved: its number of records.
    """
    return max(1, records if slots >= saved else min(records, part(slots)))
