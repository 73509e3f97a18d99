"""The KV of an attempt, or of its prompt's beginning, that comes in from another worker.

One `Incoming` an attempt. It hears its source (services/worker/following.py), the engine and its own end,
and says what follows. A DECODE is in the engine from its Start on, with its blocks reserved, and cannot do
without the KV. What needs its first token to be built (`Prepared.late`), and a prompt that can do without
its beginning, are held here until the source has said all.

    ASKED ──begun──► BEGUN ──complete──► COMPLETE ──loaded──► LOADED
      └──────────────────complete───────────▲
    ASKED, BEGUN ──refused, lost, late, wrong, failed──► OVER ◄──wrong, failed── COMPLETE
    all but OVER ──cancelled──► OVER
    a prompt's beginning: ASKED, BEGUN ──refused, lost, late, wrong──► WHOLE ◄──wrong── COMPLETE

TRANSITIONS and OPTIONAL are that picture.
Plain state; the loop's thread only. Invariants: an attempt is submitted once,
and gets its token once, by an event that leaves its state for good; after OVER nothing counts, and after
WHOLE only the attempt's end.
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
    """The states of such KV."""

    ASKED = "asked"  # the source has said nothing
    BEGUN = "begun"  # its first records can be pulled; a request in the engine pulls
    COMPLETE = "complete"  # the token is here; the engine has all that it needs
    LOADED = "loaded"  # the KV is in the engine's cache: a request like others
    WHOLE = "whole"  # the prompt is computed from its beginning
    OVER = "over"


class Event(Enum):
    """An event in one of them."""

    BEGUN = "begun"
    COMPLETE = "complete"
    LOADED = "loaded"
    REFUSED = "refused"  # the source has nothing, or lets this worker not follow
    LOST = "lost"  # the call to the source broke, or never came about
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
        (State.COMPLETE, Event.WRONG): State.OVER,  # found as its token is given
        **{(state, event): State.OVER for state in _WAITING for event in _SOURCE_FAILS},
        **{(state, Event.FAILED): State.OVER for state in (*_WAITING, State.COMPLETE)},
        **{(state, Event.CANCELLED): State.OVER for state in State if state is not State.OVER},
    }
)
# Where the KV is an extra: what else ends it ends the attempt there, too.
OPTIONAL: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        **{(state, event): State.WHOLE for state in _WAITING for event in _SOURCE_FAILS},
        (State.COMPLETE, Event.WRONG): State.WHOLE,
    }
)


def code_of(problem: Problem) -> Failed.Code:
    """Return the code with which an attempt fails whose KV has this problem.

    SOURCE has its router keep the two workers apart for a while; not where the source was only too slow.
    """
    cut = isinstance(problem.to_error(), TransportFailed | NoCommonTransport)
    return Failed.CODE_SOURCE if cut else Failed.CODE_HANDOFF


class Seams(Protocol[Attempt_contra]):
    """The way to the engine and to the router: services/worker/entrance.py."""

    def enter(self, attempt: Attempt_contra, start: Start, complete: Complete | None) -> None:
        """Build the request, with what is loaded or without, and submit it. Raises RequestRefused."""

    def begin_load(self, attempt: Attempt_contra, manifest: Manifest) -> None:
        """Let the submitted request pull what is there."""

    def resume(self, attempt: Attempt_contra, complete: Complete) -> None:
        """Give the submitted request its token, and all that can be pulled. Raises RequestRefused."""

    def fail(self, attempt: Attempt_contra, code: Failed.Code, problem: Problem) -> None:
        """End the attempt, and tell its router why."""

    def do_without(self, attempt: Attempt_contra, problem: Problem) -> None:
        """Take note that the prompt is computed from its beginning, and why."""


class Incoming(Generic[Attempt_contra]):
    """The KV of one attempt."""

    def __init__(
        self, attempt: Attempt_contra, start: Start, seams: Seams[Attempt_contra], *, held: bool
    ) -> None:
        """Begin as the source is asked. held: the request is not built before the source has said all."""
        self.state = State.ASKED
        self.call: asyncio.Task[None] | None = None  # to the source
        self._attempt = attempt
        self._seams = seams
        self._optional = start.phase == PHASE_PREFILL
        self._held = start if held else None

    @property
    def waits(self) -> bool:
        """Whether the source has not said all: no step of the engine has the request in it."""
        return self.state in _WAITING

    @property
    def loads(self) -> bool:
        """Whether the KV is not in the engine's cache yet, but is to be."""
        return self.waits or self.state is State.COMPLETE

    def hear(self, event: Event) -> bool:
        """Go where an event leads; return whether it counts here."""
        after = self._after(event)
        if after is None:
            return False
        self.state = after
        return True

    def on_begun(self, manifest: Manifest) -> None:
        """Take what the source offers while the prompt is computed."""
        if self.hear(Event.BEGUN) and self._held is None:
            self._seams.begin_load(self._attempt, manifest)

    def on_complete(self, complete: Complete) -> None:
        """Take the source's end."""
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
        """Take it that the source says no more."""
        self._fail(event, problem, code_of(problem))

    def cancel(self) -> None:
        """Say nothing more: the attempt is over. Harmless when it was."""
        self.hear(Event.CANCELLED)
        self._held = None
        if self.call is not None:
            self.call.cancel()
            self.call = None

    def _after(self, event: Event) -> State | None:
        where = self.state, event
        can_do_without = self._optional and self._held is not None  # it is submitted once
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
