"""The writer of a save's records."""

from __future__ import annotations

from collections.abc import Callable

from baton.handoff import digests
from baton.handoff.memory.views import SaveView
from baton.handoff.records import Digests


class Fill:
    """Write consecutive records of a save, which may already be pulled. Call `close` last, and once.

    There is one Fill per prefill step, or per part of a window. The memory is not reused before `close`, even
    if the lease ends.
    """

    def __init__(
        self, view: SaveView, seed: int, closed: Callable[[bool], None], first: int, stop: int
    ) -> None:
        """Write records `first` to `stop`. closed: called by `close` with whether all were written."""
        self.view = view
        self._seed = seed
        self._closed = closed
        self._whole = first
        self._stop = stop

    def add(self, own: Digests) -> None:
        """Publish the next records, which are written. own: their unseeded digests."""
        self.view.arrived(self._whole, digests.seeded(own, self._seed, self._whole))
        self._whole += len(own)

    def close(self) -> None:
        """End writing. Readers of missing records get an error."""
        complete = self._whole == self._stop
        if not complete:
            self.view.fail()
        self._closed(complete)
