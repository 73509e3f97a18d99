"""Remember pairs of workers that do not reach each other, though this router reaches both.

A decode worker reports that it cannot get KV from where it was saved. For a while no request is then handed
over between the two: each would be prefilled for nothing. One request per `CUT_S` tries again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

CUT_S = 5.0  # time between two tries of one pair
MOST = 1024  # pairs; beyond it the oldest is forgotten

Pair = tuple[str, str]  # ids of the worker that saves KV, and of the one that pulls it


class Pairs:
    """The pairs whose last handoff failed. Used in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cut: OrderedDict[Pair, float] = OrderedDict()  # the time until which it is avoided

    def failed(self, pair: Pair) -> None:
        """Note that the second could not get KV from the first."""
        self._cut[pair] = self._clock() + CUT_S
        self._cut.move_to_end(pair)
        if len(self._cut) > MOST:
            self._cut.popitem(last=False)

    def passed(self, pair: Pair) -> None:
        """Note that KV came through."""
        self._cut.pop(pair, None)

    def avoid(self, pair: Pair) -> bool:
        """Return whether to avoid a handoff between the two. Once its time is over, one caller may try."""
        until = self._cut.get(pair)
        if until is None:
            return False
        if self._clock() < until:
            return True
        self._cut[pair] = self._clock() + CUT_S  # others go on avoiding it until the outcome is known
        return False
