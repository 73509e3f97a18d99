"""The writing side of a save's memory: records arrive in order, at once or while the save can be pulled.

A prompt computed in several steps is saved by one `Fill` per step, and a save with a window of slots by one
per part of the window.
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
        self, view: SaveView, seed: int, closed: Callable[[bool], None], first: int, stop: int
    ) -> None:
        """Start writing the records from `first` to `stop`.

        view: where to write them; seed: of their digests; closed: called by `close`, with whether all were
        written.
        """
        self.view = view
        self._seed = seed
        self._closed = closed
        self._whole = first
        self._stop = stop

    def add(self, own: Digests) -> None:
        """Publish the next len(own) records, which have been written. own: their digests without a seed."""
        self.view.arrived(self._whole, digests.seeded(own, self._seed, self._whole))
        self._whole += len(own)

    def close(self) -> None:
        """Finish writing; readers of records that never arrived get an error."""
        complete = self._whole == self._stop
        if not complete:
            self.view.fail()
        self._closed(complete)
