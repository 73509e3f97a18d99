"""One saved prompt of a rank: its slots, and how far they are filled and taken."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from baton.handoff.memory.arena import StagingSlots
from baton.handoff.memory.views import SaveView

Key = tuple[str, int]  # request id, epoch


@dataclass(eq=False)
class Entry:
    """One saved prompt of one rank."""

    request_id: str
    epoch: int
    place: StagingSlots = field(repr=False)
    num_blocks: int
    slots: int
    filled: int = 0  # records whose writing has begun
    taken: int = 0  # records whose slots may be reused; always 0 without a window
    wanted: int = 0  # records before this place need no slot
    published_at: float = float("inf")  # CLOCK_MONOTONIC, seconds
    expires_at: float = float("inf")  # the same
    readers: int = 0  # running pulls and open Fills
    growing: bool = False  # the prompt is still being computed
    ended: bool = False
    had_by: set[int] = field(default_factory=set, repr=False)  # ranks that have released it
    taken_by: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)  # rank -> (taken, wanted)

    @property
    def key(self) -> Key:
        return self.request_id, self.epoch

    @property
    def record_bytes(self) -> int:
        return self.place.record_bytes

    @property
    def windowed(self) -> bool:
        """Whether it has fewer slots than records."""
        return self.slots < self.num_blocks

    @property
    def room(self) -> int:
        """Number of further records that can be written now."""
        return min(self.num_blocks, max(self.taken, self.wanted) + self.slots) - self.next

    @property
    def next(self) -> int:
        """Place of the next record to write."""
        return max(self.filled, self.wanted)

    def take(self, taken: int, wanted: int, reader: tuple[int, int]) -> None:
        """Record what a rank has taken. Slots may be reused once all ranks have taken their records."""
        rank, readers = reader
        self.taken_by[rank] = taken, max(wanted, self.taken_by.get(rank, (0, 0))[1])
        if len(self.taken_by) >= readers:
            self.taken = min(one for one, _ in self.taken_by.values())
            self.wanted = min(max(each) for each in self.taken_by.values())

    @functools.cached_property
    def view(self) -> SaveView:
        return self.place.view()
