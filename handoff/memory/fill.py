"""The writing side of a save's memory: records arrive in order, at once or while the save can be pulled.

A prompt that is computed in several steps is saved by a `Fill` for each.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.handoff import digests
from baton.handoff.memory.views import SaveView
from baton.handoff.records import Digests


class Fill:
    """Write records of one save, from one thread at a time; call `close` last, and once.

    The memory stays the save's until `close`, even if its lease ends.
    """

    def __init__(
        self, view: SaveView, seed: int, closed: Callable[[], None], first: int = 0, stop: int | None = None
    ) -> None:
        """Begin to write the records from `first` to `stop`, all by default.

        view: whose records are to be written; seed: of its digests; closed: called by `close`.
        """
        self.view = view
        self._seed = seed
        self._closed = closed
        self._whole = first
        self._stop = view.num_blocks if stop is None else stop

    def add(self, own: Digests) -> None:
        """Publish the next len(own) records, which are written. own: their digests without a seed."""
        self.view.arrived(self._whole, digests.seeded(own, self._seed, self._whole))
        self._whole += len(own)

    def close(self) -> None:
        """End the writing; readers of records that never arrived get an error."""
        if self._whole < self._stop:
            self.view.fail()
        self._closed()
