"""The state machine of an attempt whose KV, or the KV of its prompt's prefix, comes from another worker.

A DECODE is in the engine from its Start on, with its blocks reserved. Two kinds of requests are held here
until the source has completed: those that need their first token to be built (`Prepared.late`), and prompts
whose prefix is pulled; these can also be computed whole. TRANSITIONS and OPTIONAL encode this picture:

    ASKED ──begun──► BEGUN ──complete──► COMPLETE ──loaded──► LOADED
      └──────────────────complete───────────▲
    ASKED, BEGUN ──refused, lost, late, wrong, failed──► OVER ◄──wrong, failed── COMPLETE
    all but OVER ──cancelled──► OVER
    a prompt's prefix: ASKED, BEGUN ──refused, lost, late, wrong──► WHOLE ◄──wrong── COMPLETE

Used on the event loop's thread. An attempt is submitted once and gets its token once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from baton.handoff.errors import ManifestError, NoCommonTransport, TransportFailed
from baton.handoff.reports import Problem
from baton.protos.handoff_pb2 import Manifest
from baton.protos.worker_pb2 import PHASE_PREFILL, Complete, Failed, Start
from baton.services.engine.errors import RequestRefused


class State(Enum):
    ASKED = "asked"  # no reply yet
    BEGUN = "begun"  # the first records can be pulled; a request in the engine pulls them
    COMPLETE = "complete"  # the source is done: the engine has the token and the manifest
    LOADED = "loaded"  # the KV is in the engine's cache
    WHOLE = "whole"  # the whole prompt is computed here
    OVER = "over"


class Event(Enum):
    BEGUN = "begun"
    COMPLETE = "complete"
    LOADED = "loaded"
    REFUSED = "refused"  # the source has nothing, or refuses the call
    LOST = "lost"  # the call broke or could not be made
    LATE = "late"  # the source did not complete in time
    WRONG = "wrong"  # the source's reply does not fit the request
    FAILED = "failed"  # the engine could not load the KV
    CANCELLED = "cancelled"  # the attempt ended for another reason


_SOURCE_FAILS = (Event.REFUSED, Event.LOST, Event.LATE, Event.WRONG)
_WAITING = (State.ASKED, State.BEGUN)

TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.ASKED, Event.BEGUN): State.BEGUN,
        (State.ASKED, Event.COMPLETE): State.COMPLETE,
        (State.BEGUN, Event.COMPLETE): State.COMPLETE,
        (State.COMPLETE, Event.LOADED): State.LOADED,
        (State.COMPLETE, Event.WRONG): State.OVER,  # found when the token is passed to the request
        **{(state, event): State.OVER for state in _WAITING for event in _SOURCE_FAILS},
        **{(state, Event.FAILED): State.OVER for state in (*_WAITING, State.COMPLETE)},
        **{(state, Event.CANCELLED): State.OVER for state in State if state is not State.OVER},
    }
)
# Takes precedence over TRANSITIONS if the KV is optional.
OPTIONAL: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        **{(state, event): State.WHOLE for state in _WAITING for event in _SOURCE_FAILS},
        (State.COMPLETE, Event.WRONG): State.WHOLE,
    }
)


def code_of(problem: Problem) -> Failed.Code:
    """Return the failure code for a problem with an attempt's KV.

    After CODE_SOURCE the router avoids this pair of workers for a while, so a source that was only slow is
    not reported with it.
    """
    cut = isinstance(problem.to_error(), TransportFailed | NoCommonTransport)
    return Failed.CODE_SOURCE if cut else Failed.CODE_HANDOFF


class Seams(Protocol):
    """The methods of Entrance that Incoming calls. An `attempt` is a RunningAttempt."""

    def enter(self, attempt: Any, start: Start, complete: Complete | None) -> None: ...
    def begin_load(self, attempt: Any, manifest: Manifest) -> None: ...
    def resume(self, attempt: Any, complete: Complete) -> None: ...
    def fail(self, attempt: Any, code: Failed.Code, problem: Problem) -> None: ...
    def do_without(self, attempt: Any, problem: Problem) -> None: ...


class Incoming:
    """The KV of one attempt."""

    def __init__(self, attempt: Any, start: Start, entrance: Seams, *, held: bool) -> None:
        """With `held`, build and submit the request only once the source has completed."""
        self.state = State.ASKED
        self.call: asyncio.Task[None] | None = None  # the call to the source
        self._attempt = attempt
        self._entrance = entrance
        self._optional = start.phase == PHASE_PREFILL
        self._held = start if held else None

    @property
    def waits(self) -> bool:
        """Whether the source has not completed yet, so that no engine step includes the request."""
        return self.state in _WAITING

    @property
    def loads(self) -> bool:
        return self.waits or self.state is State.COMPLETE

    def hear(self, event: Event) -> bool:
        """Apply an event; return whether it had an effect in this state."""
        after = self._after(event)
        if after is None:
            return False
        self.state = after
        return True

    def on_begun(self, manifest: Manifest) -> None:
        """Pull the records that the source offers while the prompt is still being computed."""
        if self.hear(Event.BEGUN) and self._held is None:
            self._entrance.begin_load(self._attempt, manifest)

    def on_complete(self, complete: Complete) -> None:
        if not self.hear(Event.COMPLETE):
            return
        held, self._held = self._held, None
        try:
            if held is None:
                self._entrance.resume(self._attempt, complete)
            else:
                self._entrance.enter(self._attempt, held, complete)
        except RequestRefused as refused:
            self._held = held  # the request was not submitted
            self._fail(Event.WRONG, Problem.of(ManifestError(str(refused))), refused.code)

    def on_failed(self, event: Event, problem: Problem) -> None:
        self._fail(event, problem, code_of(problem))

    def cancel(self) -> None:
        """Stop, because the attempt has ended. Idempotent."""
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
            self._entrance.fail(self._attempt, code, problem)
            return
        self._entrance.do_without(self._attempt, problem)
        try:
            self._entrance.enter(self._attempt, held, None)
        except RequestRefused as refused:
            self._entrance.fail(self._attempt, refused.code, Problem.of(ManifestError(str(refused))))
