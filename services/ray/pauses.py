"""The pauses between turns of the control loop, which grow while turns fail, and the reports of failures.

Running parts serve without the loop, so no part is ended while Ray's control service is down. Changes such as
a dead node are handled when it is back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TURN_S = 0.5  # pause after a good turn
MOST_S = 5.0  # longest pause after a failed turn, which may delay the end by as much
TELL_S = 60.0  # between two reports of the same failure


class Pauses:
    """Computes the pauses, and reports failures. Not thread-safe."""

    def __init__(self, tell: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._failed = 0  # failed turns in a row
        self._since = 0.0  # time of the first of them
        self._problem = ""
        self._told = 0.0

    @property
    def failing_s(self) -> float:
        """Return the seconds since turns began to fail; 0 if the last one succeeded."""
        return self._clock() - self._since if self._failed else 0.0

    def went_well(self) -> float:
        """Record a successful turn; return the seconds to wait before the next one."""
        if self._failed:
            self._tell("ray", f"answers again: {self._failed} turns failed, in {self.failing_s:.0f} s")
        self._failed = 0
        return TURN_S

    def failed(self, error: Exception) -> float:
        """Record a failed turn; return the seconds to wait before the next one."""
        now, problem = self._clock(), f"{type(error).__name__}: {' '.join(str(error).split())}"
        if not self._failed:
            self._since = now
        self._failed += 1
        if self._failed == 1 or problem != self._problem or now - self._told >= TELL_S:
            left = "; running parts continue, but nothing is started or ended until it works again"
            self._tell("ray", f"{problem}{left if self._failed > 1 else ''}")
            self._told, self._problem = now, problem
        return float(min(MOST_S, TURN_S * 2 ** min(self._failed - 1, 10)))
