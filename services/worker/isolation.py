"""Try requests alone: while one of them runs, no step of the engine includes another.

A router asks for this if an engine failed under a request. Running requests get `GRACE_S` to end, and are
then moved to other workers, as at the end of a drain. Requests that wait for KV from a source stay: without
their token no step includes them, and their prompts may be half computed. New requests and such tokens are
held, in order, and go to the engine afterwards.

Requests to be tried alone run one after the other, whichever router sent them. Others are held for at most
`TURN_S`: a longer trial is sent back to its router, to be tried again later, and before the engine is emptied
again the others get as much time as they were held.
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
TURN_S = 5.0  # counted from when others are held
LINGER_S = 0.25  # wait for the next request of a router that has more to try
LEAST_REST_S = 0.25

Begin = Callable[[], None]


class Isolation:
    """The door between a worker's attempts and its engine. For the event loop's thread.

    Invariant: while `_now` is set, no step of the engine has another live attempt.
    """

    def __init__(self, attempts: Attempts, move_on: Callable[[list[RunningAttempt]], None]) -> None:
        """Start with the door open. move_on: takes attempts from the engine, to run them elsewhere."""
        self._attempts = attempts
        self._move_on = move_on
        self._alone: OrderedDict[str, tuple[RunningAttempt, Begin]] = OrderedDict()  # waiting for a trial
        self._held: OrderedDict[str, list[Begin]] = OrderedDict()
        self._now: RunningAttempt | None = None
        self._holds = False
        self._since = 0.0  # time.monotonic at which others began to be held
        self._rests_until = 0.0  # time.monotonic
        self._lingers_until = 0.0  # time.monotonic
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, attempt: RunningAttempt, begin: Begin) -> None:
        """Call `begin`, which gives a live attempt to the engine, now or when that is allowed."""

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
        """Call `step`, which exposes the attempt to the engine's steps, now or when that is allowed."""

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
        asyncio.get_running_loop().call_soon(self._look)  # once, even if many end together

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
        inside = self._inside()
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
                "%d requests are moved to other workers: another one is to be tried alone", len(inside)
            )
            self._move_on(inside)
        _, (attempt, begin) = self._alone.popitem(last=False)
        self._now = attempt
        self._watch(attempt, now)
        begin()

    def _watch(self, attempt: RunningAttempt, now: float) -> None:
        """Send the request that runs alone back when its turn is over, if others wait."""
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

    def _inside(self) -> list[RunningAttempt]:
        return [one for one in self._attempts.all() if one.inside]

    def _look_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, when - time.monotonic()), self._look)

    def close(self) -> None:
        """Stop. No other method may be called afterwards."""
        if self._timer is not None:
            self._timer.cancel()
