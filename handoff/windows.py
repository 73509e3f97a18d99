"""Windows: large saves get fewer slots than records, and reuse them.

A window is filled, pulled and acknowledged in parts. A pulled record counts as taken only when the next part
is requested, because its memory is verified then. Acknowledgements cover whole parts, so at most two parts'
slots are waiting while the other parts are being filled.
"""

from __future__ import annotations

WHOLE_SHARE = 2  # saves larger than 1/WHOLE_SHARE of staging get a window
WINDOW_SHARE = 4  # each window is 1/WINDOW_SHARE of staging
PARTS = 4  # parts per window
LEAST = 2  # slots: one to pull from, one to fill


def slots_for(records: int, capacity: int) -> int:
    """Return how many of staging's `capacity` slots a save of `records` records gets."""
    if records * WHOLE_SHARE <= capacity:
        return records
    return min(records, max(LEAST, capacity // WINDOW_SHARE))


def part(slots: int) -> int:
    return max(1, slots // PARTS)


def at_once(records: int, slots: int, saved: int) -> int:
    """Return the records per chunk: at most one part if a save has fewer `slots` than `saved` records."""
    return max(1, records if slots >= saved else min(records, part(slots)))
