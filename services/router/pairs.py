"""Remember pairs of workers that cannot reach each other, though this router reaches both.

When a decode worker cannot pull KV from a prefill worker, requests avoid the pair: they would be prefilled
for nothing. One request per `CUT_S` tries it again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

CUT_S = 5.0  # time between two tries of one pair
MOST = 1024  # pairs; beyond it the oldest is forgotten

Pair = tuple[str, str]  # ids of the worker that saves KV and of the worker that pulls it


class Pairs:
    """The pairs whose last handoff failed. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cut: OrderedDict[Pair, float] = OrderedDict()  # the time until which it is avoided

    def failed(self, pair: Pair) -> None:
        """Record that the second worker could not pull KV from the first."""
        self._cut[pair] = self._clock() + CUT_S
        self._cut.move_to_end(pair)
        if len(self._cut) > MOST:
            self._cut.popitem(last=False)

    def passed(self, pair: Pair) -> None:
        """Record a handoff that succeeded."""
        self._cut.pop(pair, None)

    def avoid(self, pair: Pair) -> bool:
        """Return whether to avoid a handoff between the two. After `CUT_S`, one caller may try."""
        until = self._cut.get(pair)
        if until is None:
            return False
        if self._clock() < until:
            return True
        self._cut[pair] = self._clock() + CUT_S  # other requests avoid it until the outcome is known
        return False
