"""Report each request: metrics while it runs, then a record for the log, traces and the live page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from baton.services import trace_context
from baton.services.router.access_log import log_request
from baton.services.router.metrics import RouterMetrics
from baton.services.router.recent import Recent
from baton.services.router.record import Record, record_of
from baton.services.router.state import RequestState
from baton.services.trace_context import TraceContext


class TraceWriter(Protocol):
    """The destination of traces."""

    ratio: float  # share of new traces to sample

    def write(self, record: Record) -> None:
        """Write a request's trace if it is sampled or notable. Must not block."""

    def close(self) -> None:
        """Send queued traces. May block for a few seconds."""


class Chronicle:
    """Reports a router's requests. Use it in the router's event loop."""

    def __init__(self, metrics: RouterMetrics | None = None, traces: TraceWriter | None = None) -> None:
        self.recent = Recent()
        self.listeners: list[Callable[[Record], None]] = []  # called with each record; must not block
        self._metrics = metrics
        self._traces = traces

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
        """Return a new request's trace context: in its client's trace, or in a new one."""
        return trace_context.begin(headers, self._traces.ratio if self._traces is not None else 0.0)

    def first_byte(self, states: Iterable[RequestState]) -> None:
        """Count the delivery of a stream's first token; with several sequences, of the earliest one."""
        first = min((one for one in states if one.first_token), key=lambda one: one.first_token, default=None)
        if first is not None and self._metrics is not None:
            self._metrics.delivered(first)

    def sent(self, router_s: float, client_s: float) -> None:
        """Count the router's and the client's share of one sampled gap between two tokens."""
        if self._metrics is not None:
            self._metrics.gap("router", router_s)
            self._metrics.gap("client", client_s)

    def over(self, state: RequestState) -> None:
        """Report a request whose response is sent. Call it once per request."""
        record = record_of(state)
        self.recent.add(record)
        log_request(state, record)
        if self._traces is not None:
            self._traces.write(record)
        for listener in self.listeners:
            listener(record)

    def close(self) -> None:
        """Send queued traces; may block for seconds."""
        if self._traces is not None:
            self._traces.close()
