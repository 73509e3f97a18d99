"""Keep a gang's engines in step: they compute one mixture of experts, so a forward pass needs all of them.

Every engine takes the same number of turns: steps, or dummy forward passes if it has nothing to compute. In a
wave's first turn, and in every turn whose number is a multiple of `interval`, they agree on whether any
engine has work; if none has, all stop, which ends the wave. An engine that gets work while the gang is
stopped rings the others with the number of its wave.

No ring is lost: an engine enters wave w only after the agreement that ended wave w - 1, to which all engines
contributed, so the others are in wave w or later when they handle the ring. If they are in a later wave, wave
w has run with all of them.
"""

from __future__ import annotations

from collections.abc import Callable

INTERVAL = 16  # turns


class Lockstep:
    """One engine's view of its gang: the wave, the turn, and whether the gang is running.

    Invariant: between two agreements every engine of the gang has the same wave and turn.

    agree: takes whether this engine has work, waits for all engines, and returns whether any has
    ring: tells every other engine that this one has work in the wave
    dummy: computes a forward pass without requests
    """

    def __init__(
        self,
        agree: Callable[[bool], bool],
        ring: Callable[[int], None],
        dummy: Callable[[], None],
        interval: int = INTERVAL,
    ) -> None:
        self._agree, self._ring, self._dummy = agree, ring, dummy
        self._interval = interval
        self._turn = 0  # turns taken in this wave
        self.wave = 0
        self.running = False
        self.dummies = 0  # forward passes without requests since the start

    def rung(self, wave: int) -> None:
        """Start running if another engine has work in the current wave. Call it between two turns."""
        if wave == self.wave:
            self.running = True

    def start(self) -> None:
        """Start the gang if it is stopped, because this engine has work."""
        if not self.running:
            self.running = True
            self._ring(self.wave)

    def finish_turn(self, *, executed: bool, busy: bool) -> None:
        """Complete a turn. executed: this engine computed a step in it; busy: it has more work."""
        if not executed:
            self._dummy()
            self.dummies += 1
        self._turn += 1
        if self._turn == 1 or self._turn % self._interval == 0:
            self.running = self._agree(busy)
            if not self.running:
                self.wave += 1
                self._turn = 0

    def finish_wave(self) -> None:
        """Take part in the wave until it ends, when no engine has work. This engine may then end."""
        while self.running:
            self.finish_turn(executed=False, busy=False)
