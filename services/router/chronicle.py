"""Report each request: metrics while it runs, then a record for the log, traces and the live page."""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count, islice
from typing import TYPE_CHECKING
from urllib.parse import quote

from baton.services import trace_context
from baton.services.router.metrics import RouterMetrics
from baton.services.router.record import Record, record_of, usage_of
from baton.services.router.state import RequestState
from baton.services.trace_context import TraceContext

if TYPE_CHECKING:
    from baton.services.router.tracing import Traces

log = logging.getLogger("baton.requests")  # its level is router.log_level

LAST = 200  # records that the live page shows
SLOWEST = 50
WINDOW_S = 900.0
_PART_S = 60.0  # the slowest records are kept per minute, and expire with their minute


class Chronicle:
    """Reports a router's requests. Use it in the router's event loop."""

    def __init__(self, metrics: RouterMetrics, traces: Traces | None = None) -> None:
        self.recent = Recent()
        self.listeners: list[Callable[[Record], None]] = []  # called with each record; must not block
        self._metrics = metrics
        self._traces = traces

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> TraceContext:
        """Return a new request's trace context: in its client's trace, or in a new one."""
        return trace_context.begin(headers, self._traces.ratio if self._traces is not None else 0.0)

    def first_byte(self, states: Iterable[RequestState]) -> None:
        """Count the delivery of a stream's first token; with several sequences, of the earliest token."""
        first = min((one for one in states if one.first_token), key=lambda one: one.first_token, default=None)
        if first is not None:
            self._metrics.delivered(first)

    def sent(self, router_s: float, client_s: float) -> None:
        """Count the router's and the client's share of one sampled gap between two tokens."""
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
        if self._traces is not None:
            self._traces.close()


class Recent:
    """Records of finished requests. Not thread-safe."""

    def __init__(
        self, last: int = LAST, slowest: int = SLOWEST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep the `last` most recent records, and the `slowest` of each minute for 15 minutes."""
        self._clock = clock
        self._last: deque[Record] = deque(maxlen=last)
        self._most = slowest
        # One heap per minute, the fastest record first; the number breaks ties.
        self._slow: deque[tuple[float, list[tuple[float, int, Record]]]] = deque()
        self._numbers = count()

    def add(self, record: Record) -> None:
        """Add a record. This costs a few comparisons unless the record is among the slowest."""
        self._last.append(record)
        now = self._clock()
        self._forget(now)
        if not self._slow or now >= self._slow[-1][0] + _PART_S:
            self._slow.append((now, []))
        heap = self._slow[-1][1]
        entry = (record.slowness_s, next(self._numbers), record)
        if len(heap) < self._most:
            heapq.heappush(heap, entry)
        elif entry[0] > heap[0][0]:
            heapq.heapreplace(heap, entry)

    def last(self, n: int = LAST) -> list[Record]:
        """Return the last `n` requests, the latest first."""
        return list(islice(reversed(self._last), n))

    def slowest(self, n: int = SLOWEST) -> list[Record]:
        """Return the `n` slowest requests of the last 15 minutes, the slowest first."""
        self._forget(self._clock())
        entries = heapq.nlargest(min(n, self._most), (entry for _, heap in self._slow for entry in heap))
        return [record for _, _, record in entries]

    def find(self, request_id: str) -> Record | None:
        for one in (*self.last(), *self.slowest()):
            if request_id in (one.request_id, one.response_id):
                return one
        return None

    def _forget(self, now: float) -> None:
        while self._slow and self._slow[0][0] < now - WINDOW_S:
            self._slow.popleft()


def log_request(state: RequestState, record: Record) -> None:
    """Log a finished sequence, its cost, and its time to first token by stage."""
    if not log.isEnabledFor(logging.INFO):
        return
    fields = {
        "request_id": record.request_id,
        "trace_id": record.trace.trace_id,
        "tenant": record.tenant or None,
        "class": record.service,
        "status": record.status or None,
        "outcome": record.outcome,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "duration_ms": _ms(record.ended - record.arrived),
        "ttft_ms": _ms(record.first_token_s) if record.first_token_s else None,
        "client_ms": _ms(record.client_s),
        **usage_of([state]),
        "stages_ms": {name: _ms(seconds) for name, seconds in record.first_token_stages.items()},
    }
    log.info("request", extra=fields)


def log_without_sequence(status: int, path: str, tenant: str = "", error: str = "") -> None:
    """Log a request that never started a sequence: refused for its key or limits, or malformed."""
    # Quoted: a line break in a path must not start another log line.
    fields = {"status": status, "tenant": tenant or None, "path": quote(path), "error": error or None}
    log.info("request", extra=fields)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
