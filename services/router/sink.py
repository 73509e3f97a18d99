"""Deliver one request's outputs to the front end, in order and on the router's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from baton.services.router.errors import RequestFailed
from baton.services.router.state import RequestState


class FrontEnd(Protocol):
    """Receives tokens and errors under its own request ids; see `RelayClient`. No call may block."""

    def deliver(self, output: Any) -> None: ...
    def deliver_first(self, output: Any) -> None: ...
    def finish(self, request_id: str, reason: str) -> None: ...
    def fail(self, request_id: str, error: RequestFailed) -> None: ...
    def adapt(self, output: Any, clock_offset_s: float, *, resumed: bool) -> tuple[float, float]: ...
    def watch(self, request_id: str, received: float) -> None: ...


class OutputSink:
    """Passes one request's outputs to the front end. The legs set the front end's request id in each output.

    After the first token `deliver` is the front end's own method, to save a call per token.
    """

    deliver: Callable[[Any], None]

    def __init__(self, state: RequestState, front_end: FrontEnd, on_first_token: Callable[[], None]) -> None:
        self._state = state
        self._front_end = front_end
        self._on_first_token = on_first_token
        self._has_token = False  # the front end has received a token
        self._held: Any = None  # an output to deliver before the next one
        self.deliver = self._deliver_first

    def adapt(self, output: Any, clock_offset_s: float) -> tuple[float, float]:
        """Convert the times in a leg's first output, or in one with events, to our clock.

        Return when the engine queued and first scheduled the request; 0 if unknown.
        """
        return self._front_end.adapt(output, clock_offset_s, resumed=bool(self._state.tokens))

    def watch(self, received: float) -> None:
        self._front_end.watch(self._state.frontend_id, received)

    def hold(self, output: Any) -> None:
        """Hold an output back until the next one is delivered or the request finishes."""
        self._release()
        self._held = output
        self.deliver = self._deliver_first

    def finish(self, reason: str) -> None:
        self._release()
        self._front_end.finish(self._state.frontend_id, reason)

    def fail(self, error: RequestFailed) -> None:
        """End the request with an error. An output that is held back is never delivered."""
        self._front_end.fail(self._state.frontend_id, error)

    def close(self) -> None:
        """Break the reference cycle with the relay, so that a finished request is freed without the GC."""
        self._held = None
        self._on_first_token = lambda: None
        self.deliver = self._front_end.deliver

    def _release(self) -> None:
        output, self._held = self._held, None
        if output is not None:
            self._deliver_first(output)

    def _deliver_first(self, output: Any) -> None:
        """Deliver an output while no token has been delivered yet, or an output is held back."""
        self._release()
        if output.new_token_ids:
            if not self._has_token:
                self._has_token = True
                self._on_first_token()
            self.deliver = self._front_end.deliver
        self._front_end.deliver_first(output)
