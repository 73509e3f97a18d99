"""Follow the KV of an attempt, or of its prompt's beginning, that comes from another worker.

Each attempt has one `Incoming`. It hears its source (services/worker/following.py), the engine and its own
end, and decides what follows. A DECODE is in the engine from its Start on, with its blocks reserved, and
cannot do without the KV. A request that needs its first token to be built (`Prepared.late`), and a prompt
that can do without the KV of its beginning, are held here until the source has said everything.

    ASKED ──begun──► BEGUN ──complete──► COMPLETE ──loaded──► LOADED
      └──────────────────complete───────────▲
    ASKED, BEGUN ──refused, lost, late, wrong, failed──► OVER ◄──wrong, failed── COMPLETE
    all but OVER ──cancelled──► OVER
    a prompt's beginning: ASKED, BEGUN ──refused, lost, late, wrong──► WHOLE ◄──wrong── COMPLETE

TRANSITIONS and OPTIONAL encode that picture. Plain state; loop's thread only.

Invariants: an attempt is submitted once, and gets its token once, by an event that leaves its state for good;
after OVER no event counts, and after WHOLE only the attempt's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from baton.handoff.errors import ManifestError, NoCommonTransport, TransportFailed
from baton.handoff.reports import Problem
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_PREFILL, Complete, Failed, Start
from baton.services.engine.errors import RequestRefused

Attempt_contra = TypeVar("Attempt_contra", contravariant=True)  # RunningAttempt, which holds its Incoming


class State(Enum):
    """The states of incoming KV."""

    ASKED = "asked"  # the source has said nothing
    BEGUN = "begun"  # its first records can be pulled; a request in the engine pulls
    COMPLETE = "complete"  # the token is here; the engine has all that it needs
    LOADED = "loaded"  # the KV is in the engine's cache: a request like any other
    WHOLE = "whole"  # the prompt is computed from its beginning
    OVER = "over"


class Event(Enum):
    """The events of incoming KV."""

    BEGUN = "begun"
    COMPLETE = "complete"
    LOADED = "loaded"
    REFUSED = "refused"  # the source has nothing, or does not let this worker follow
    LOST = "lost"  # the call to the source broke or was never made
    LATE = "late"  # the source did not end in time
    WRONG = "wrong"  # what the source said does not fit the request
    FAILED = "failed"  # the engine could not load it
    CANCELLED = "cancelled"  # the attempt ended in another way


_SOURCE_FAILS = (Event.REFUSED, Event.LOST, Event.LATE, Event.WRONG)
_WAITING = (State.ASKED, State.BEGUN)

TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.ASKED, Event.BEGUN): State.BEGUN,
        (State.ASKED, Event.COMPLETE): State.COMPLETE,
        (State.BEGUN, Event.COMPLETE): State.COMPLETE,
        (State.COMPLETE, Event.LOADED): State.LOADED,
        (State.COMPLETE, Event.WRONG): State.OVER,  # found when its token is given
        **{(state, event): State.OVER for state in _WAITING for event in _SOURCE_FAILS},
        **{(state, Event.FAILED): State.OVER for state in (*_WAITING, State.COMPLETE)},
        **{(state, Event.CANCELLED): State.OVER for state in State if state is not State.OVER},
    }
)
# Applies if the KV is optional. All other events end the attempt as in TRANSITIONS.
OPTIONAL: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        **{(state, event): State.WHOLE for state in _WAITING for event in _SOURCE_FAILS},
        (State.COMPLETE, Event.WRONG): State.WHOLE,
    }
)


def code_of(problem: Problem) -> Failed.Code:
    """Return the code with which an attempt fails when its KV has this problem.

    SOURCE makes the router keep the two workers apart for a while; it is not used if the source was merely
    too slow.
    """
    cut = isinstance(problem.to_error(), TransportFailed | NoCommonTransport)
    return Failed.CODE_SOURCE if cut else Failed.CODE_HANDOFF


class Seams(Protocol[Attempt_contra]):
    """The way to the engine and to the router: services/worker/entrance.py."""

    def enter(self, attempt: Attempt_contra, start: Start, complete: Complete | None) -> None:
        """Build the request, with or without loaded KV, and submit it. Raises RequestRefused."""

    def begin_load(self, attempt: Attempt_contra, manifest: Manifest) -> None:
        """Let the submitted request pull the available KV."""

    def resume(self, attempt: Attempt_contra, complete: Complete) -> None:
        """Give the submitted request its token and all KV. Raises RequestRefused."""

    def fail(self, attempt: Attempt_contra, code: Failed.Code, problem: Problem) -> None:
        """End the attempt, and tell its router why."""

    def do_without(self, attempt: Attempt_contra, problem: Problem) -> None:
        """Note that the prompt is computed from its beginning, and why."""


class Incoming(Generic[Attempt_contra]):
    """The KV of one attempt."""

    def __init__(
        self, attempt: Attempt_contra, start: Start, seams: Seams[Attempt_contra], *, held: bool
    ) -> None:
        """Begin when the source is asked. held: build the request only once the source has said all."""
        self.state = State.ASKED
        self.call: asyncio.Task[None] | None = None  # the call to the source
        self._attempt = attempt
        self._seams = seams
        self._optional = start.phase == PHASE_PREFILL
        self._held = start if held else None

    @property
    def waits(self) -> bool:
        """Whether the source has more to say: no step of the engine includes the request yet."""
        return self.state in _WAITING

    @property
    def loads(self) -> bool:
        """Whether the KV is still on its way to the engine's cache."""
        return self.waits or self.state is State.COMPLETE

    def hear(self, event: Event) -> bool:
        """Apply an event; return whether it counts in this state."""
        after = self._after(event)
        if after is None:
            return False
        self.state = after
        return True

    def on_begun(self, manifest: Manifest) -> None:
        """Take the records that the source offers while the prompt is computed."""
        if self.hear(Event.BEGUN) and self._held is None:
            self._seams.begin_load(self._attempt, manifest)

    def on_complete(self, complete: Complete) -> None:
        """Take the source's final answer."""
        if not self.hear(Event.COMPLETE):
            return
        held, self._held = self._held, None
        try:
            if held is None:
                self._seams.resume(self._attempt, complete)
            else:
                self._seams.enter(self._attempt, held, complete)
        except RequestRefused as refused:
            self._held = held  # it was not submitted
            self._fail(Event.WRONG, Problem.of(ManifestError(str(refused))), refused.code)

    def on_failed(self, event: Event, problem: Problem) -> None:
        """Note that the source says no more."""
        self._fail(event, problem, code_of(problem))

    def cancel(self) -> None:
        """Stop: the attempt is over. Idempotent."""
        self.hear(Event.CANCELLED)
        self._held = None
        if self.call is not None:
            self.call.cancel()
            self.call = None

    def _after(self, event: Event) -> State | None:
        where = self.state, event
        can_do_without = self._optional and self._held is not None  # a request is submitted only once
        return (OPTIONAL.get(where) if can_do_without else None) or TRANSITIONS.get(where)

    def _fail(self, event: Event, problem: Problem, code: Failed.Code) -> None:
        if not self.hear(event):
            return
        held, self._held = self._held, None
        if held is None or self.state is not State.WHOLE:
            self._seams.fail(self._attempt, code, problem)
            return
        self._seams.do_without(self._attempt, problem)
        try:
            self._seams.enter(self._attempt, held, None)
        except RequestRefused as refused:
            self._seams.fail(self._attempt, refused.code, Problem.of(ManifestError(str(refused))))
