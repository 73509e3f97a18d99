"""Run suspect requests alone: while one runs, no engine step includes another request.

A router asks for this if an engine failed while the request was running. Running requests get `GRACE_S` to
finish and are then moved to other workers; requests that are waiting for KV stay. New requests, and first
tokens, are held and passed on in order afterwards. Suspects run one after another. Other requests are held
for at most `TURN_S`: a suspect that takes longer is sent back, and the engine is emptied again only after the
other requests have run for as long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from baton.services.worker.attempts import Attempts, RunningAttempt

logger = logging.getLogger(__name__)

# All in seconds.
GRACE_S = 1.0
TURN_S = 5.0  # how long other requests are held once GRACE_S has passed
LINGER_S = 0.25  # how long to wait for a suspect that a router has announced
LEAST_REST_S = 0.25  # the shortest time for other requests before the next suspect

Begin = Callable[[], None]


class EngineGate:
    """On the event loop's thread. Invariant: while `_now` is set, no step includes another live attempt."""

    def __init__(self, attempts: Attempts, move_on: Callable[[list[RunningAttempt]], None]) -> None:
        """Use `move_on` to abort attempts, so that their routers place them elsewhere."""
        self._attempts = attempts
        self._move_on = move_on
        self._alone: OrderedDict[str, tuple[RunningAttempt, Begin]] = OrderedDict()  # waiting suspects
        self._held: OrderedDict[str, list[Begin]] = OrderedDict()
        self._now: RunningAttempt | None = None
        self._holds = False
        self._since = 0.0  # time.monotonic at which holding began
        self._rests_until = 0.0  # time.monotonic
        self._lingers_until = 0.0  # time.monotonic
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, attempt: RunningAttempt, begin: Begin) -> None:
        """Call `begin`, which submits a live attempt to the engine, as soon as that is allowed."""

        def let_in() -> None:
            attempt.inside = attempt.incoming is None or not attempt.incoming.waits
            begin()

        if attempt.alone:
            self._alone[attempt.internal_id] = attempt, let_in
            self._look()
        elif self._holds:
            self._held[attempt.internal_id] = [let_in]
        else:
            let_in()

    def then(self, attempt: RunningAttempt, step: Begin) -> None:
        """Call `step` after the attempt's `begin`."""
        if (steps := self._held.get(attempt.internal_id)) is not None:
            steps.append(step)
        else:
            step()

    def go_on(self, attempt: RunningAttempt, step: Begin) -> None:
        """Call `step` as soon as that is allowed; from then on, engine steps include the attempt."""

        def let_go() -> None:
            attempt.inside = True
            step()

        if self._holds:
            self._held.setdefault(attempt.internal_id, []).append(let_go)
        else:
            let_go()

    def ended(self, attempt: RunningAttempt) -> None:
        if not (self._holds or self._alone):
            return
        self._held.pop(attempt.internal_id, None)
        self._alone.pop(attempt.internal_id, None)
        if attempt is self._now:
            self._now = None
            self._lingers_until = time.monotonic() + LINGER_S if attempt.more_alone else 0.0
        asyncio.get_running_loop().call_soon(self._look)  # later, when all that end together have ended

    def _look(self) -> None:
        now = time.monotonic()
        if self._now is not None:
            self._watch(self._now, now)
        elif self._holds and now >= self._since + GRACE_S + TURN_S:
            self._release(now)
        elif self._alone:
            self._make_way(now)
        elif self._holds:
            if now < self._lingers_until:
                self._look_at(self._lingers_until)
            else:
                self._release(now)

    def _make_way(self, now: float) -> None:
        inside = [one for one in self._attempts.all() if one.inside]
        if not self._holds:
            if inside and now < self._rests_until:
                self._look_at(self._rests_until)
                return
            self._holds, self._since = True, now
        if inside and now < self._since + GRACE_S:
            self._look_at(self._since + GRACE_S)
            return
        if inside:
            logger.info(
                "%d requests are moved to other workers, because a suspect must run alone", len(inside)
            )
            self._move_on(inside)
        _, (attempt, begin) = self._alone.popitem(last=False)
        self._now = attempt
        self._watch(attempt, now)
        begin()

    def _watch(self, attempt: RunningAttempt, now: float) -> None:
        """Send the suspect back to its router when its time is up, if other requests are waiting."""
        ends = self._since + GRACE_S + TURN_S
        if now < ends:
            self._look_at(ends)
        elif self._held or self._alone:
            self._move_on([attempt])
        else:
            self._look_at(now + LEAST_REST_S)

    def _release(self, now: float) -> None:
        self._holds, self._lingers_until = False, 0.0
        self._rests_until = now + max(LEAST_REST_S, now - self._since)
        held, self._held = self._held, OrderedDict()
        for steps in held.values():
            for step in steps:
                step()
        if self._alone:
            self._look_at(self._rests_until)

    def _look_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, when - time.monotonic()), self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
