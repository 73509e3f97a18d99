"""Deliver one request's outputs to the front end: in order, and on the front end's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from baton.services.router.errors import RequestFailed
from baton.services.router.state import RequestState


class FrontEnd(Protocol):
    """The destination of tokens and errors. Called from the event loop; no call may block."""

    def deliver(self, output: Any) -> None:
        """Take an output under the front end's own request id."""

    def deliver_first(self, output: Any) -> None:
        """Take an output that the client must get at once: its first, or the first after a pause."""

    def finish(self, request_id: str, reason: str) -> None:
        """End a request without another token."""

    def fail(self, request_id: str, error: RequestFailed) -> None:
        """End a request with an error."""

    def first_output(self, output: Any, clock_offset_s: float) -> tuple[float, float]:
        """Convert a first output's times to our clock.

        Return when its engine queued and first scheduled the request, seconds; 0 if unknown.
        """

    def later_output(self, output: Any, clock_offset_s: float) -> tuple[float, float]:
        """Do the same for another engine's output, and remove what the front end already knows."""

    def watch(self, request_id: str, received: float) -> None:
        """Time the next piece of a streamed response, from an output that arrived here at `received`."""


def _nothing() -> None:
    """Do nothing."""


class OutputSink:
    """One request's outputs on their way to the front end. Its legs set the front end's id in each.

    After the first token `deliver` is the front end's own method: a token costs no call here.
    """

    deliver: Callable[[Any], None]

    def __init__(self, state: RequestState, front_end: FrontEnd, on_first_token: Callable[[], None]) -> None:
        self._state = state
        self._front_end = front_end
        self._on_first_token = on_first_token
        self._has_token = False  # whether the front end has one
        self._held: Any = None  # an output that is delivered before the next one
        self.deliver = self._deliver_first

    def adapt(self, output: Any, clock_offset_s: float) -> tuple[float, float]:
        """Prepare a leg's first output, and any with events, for the front end.

        Return when its engine queued and first scheduled the request, on our clock; 0 if unknown.
        """
        if self._state.tokens:
            return self._front_end.later_output(output, clock_offset_s)
        return self._front_end.first_output(output, clock_offset_s)

    def watch(self, received: float) -> None:
        """Measure the front end's part of an output that arrived here at `received`."""
        self._front_end.watch(self._state.frontend_id, received)

    def hold(self, output: Any) -> None:
        """Hold an output back until the next one is delivered, or the request ends well."""
        self._release()
        self._held = output
        self.deliver = self._deliver_first

    def finish(self, reason: str) -> None:
        self._release()
        self._front_end.finish(self._state.frontend_id, reason)

    def fail(self, error: RequestFailed) -> None:
        """End the request with an error; an output that is held back is lost."""
        self._front_end.fail(self._state.frontend_id, error)

    def close(self) -> None:
        """Let go of the relay, which holds this sink, and of any held output; no more will come.

        Otherwise each request would leave a cycle of references, and its prompt and tokens would stay in
        memory until the garbage collector runs.
        """
        self._held = None
        self._on_first_token = _nothing
        self.deliver = self._front_end.deliver

    def _release(self) -> None:
        output, self._held = self._held, None
        if output is not None:
            self._deliver_first(output)

    def _deliver_first(self, output: Any) -> None:
        """Deliver an output until the first token is out and nothing is held back."""
        self._release()
        if output.new_token_ids:
            if not self._has_token:
                self._has_token = True
                self._on_first_token()
            self.deliver = self._front_end.deliver
        self._front_end.deliver_first(output)
