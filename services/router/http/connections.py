"""A router's HTTP connections: uvicorn's, with bounds on the size and the pace of requests.

It costs nothing per token, and a client within its limits a few comparisons per request.

    too many connections          503, and far above the limit the connection is dropped without a response
    headers that never end        408, or 431 where they are too large
    a body that is too large      413, before it is read where its length is declared, else once it exceeds
    a body that never ends        408
    a response that is not read   the connection is cut: the request is aborted as for any client that leaves
    a router that ends            each connection may have one request more, for LAST_REQUEST_S

Leans on: uvicorn.protocols.http.httptools_impl (HttpToolsProtocol: its callbacks of transport and parser,
_start_asgi_task, cycle, connections, flow; RequestResponseCycle: disconnected, message_event, more_body,
response_started, response_complete; STATUS_LINE).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton.services.router.errors import (
    HeadersTooLarge,
    Overloaded,
    RequestFailed,
    TooLarge,
    TooSlow,
    Unsupported,
)
from baton.services.router.http.admission import TIMES
from baton.services.router.http.forms import Scope, error_response, is_anthropics
from baton.services.router.timings import HttpTimes

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10  # with the request's first line
# A request may take slow_client_s, and as much longer as it takes at this rate (bytes/s).
LEAST_SENT_PER_S = 16 << 10
LEAST_READ_PER_S = 1 << 10  # bytes/s, of a response that fills its connection's buffers
# Refused connections that may wait for their 503; more than these are dropped: file descriptors are finite.
SPARE_CONNECTIONS = 256
OWN_DESCRIPTORS = 512  # of the router beside its clients: workers, scheduler, files
# The kernel's buffer per connection. Its default grows to megabytes for a client that does not read, and
# reports progress only when a third is free: a slow client must read at least that much in slow_client_s.
SEND_BUFFER_BYTES = 64 << 10
WRITE_BUFFER_BYTES = 16 << 10  # our own per connection; above it a response waits for its client to read
LINGER_S = 2.0  # a refused client may go on sending for this long: cut at once it would not see the response
BODIES_AT_ONCE = 8  # bodies of the largest size that fit into memory; smaller ones in proportion
RETRY_AFTER_S = 1.0
# A router that ends hears each open connection for so long: a request may be on its way, and a client that
# kept the connection from a response without `Connection: close` sends its next one at once.
LAST_REQUEST_S = 0.5


@dataclass(frozen=True)
class HttpLimits:
    """The limits for every client."""

    max_body: int  # bytes
    max_connections: int
    slow_client_s: float


# Called for each client that is refused with the response's status, "dropped" (too many connections, no
# response) or "unread" (the client did not read its response).
OnRefused = Callable[[str], None]


class Intake:
    """The bytes of all bodies that are read or processed now. One for all connections of a router."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    @property
    def full(self) -> bool:
        """Whether the limit is exceeded."""
        return self.held > self.limit


class LimitedConnection(HttpToolsProtocol):
    """One client's connection; its requests follow one another."""

    def __init__(self, *, limits: HttpLimits, intake: Intake, refused: OnRefused, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._intake = intake
        self._on_refused = refused
        self._running: RequestResponseCycle | None = None  # its response is under way
        self._refused = False
        self._in_message = False  # from a request's first byte to its last
        self._in_body = False  # from its headers' end on, until the next one begins
        self._header_bytes = 0
        self._body_bytes = 0
        self._held = 0  # of the intake
        self._received = 0  # bytes since the arrival began
        self._arrival_began = 0.0  # the loop's time
        self._arrival: asyncio.TimerHandle | None = None  # of a request that is not complete yet
        self._draining: asyncio.TimerHandle | None = None  # of a response that waits for its client to read
        self._tail: asyncio.TimerHandle | None = None  # of a finished response's last bytes, not yet read
        self._ending = False  # the router ends: the next response is the last one
        self._farewell: asyncio.TimerHandle | None = None  # until an unused connection is closed then
        self._times = HttpTimes()  # of the exchange whose response is under way
        self._paused = 0.0  # time.monotonic: the response waits for its client to read since then

    # -- the transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self.connections) > self._limits.max_connections + SPARE_CONNECTIONS:
            self._refused = True
            self._cut("dropped")
            return
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._arrival = _cancelled(self._arrival)
        self._draining = _cancelled(self._draining)
        self._tail = _cancelled(self._tail)
        self._farewell = _cancelled(self._farewell)
        self._release_body()
        _abandon(self._running)  # with pipelined requests uvicorn notifies only the last one

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._arrival is None:
            self._expect()
        self._received += len(data)
        super().data_received(data)
        if not self._in_body and self._arrival is not None and self._received > MAX_HEADER_BYTES:
            self._refuse(_too_many_headers())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused = time.monotonic()
        self._watch_draining()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._times.paused_s += time.monotonic() - self._paused
        self._draining = _cancelled(self._draining)

    # -- the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(Scope, self.scope)[TIMES] = HttpTimes()
        if self._arrival is None:
            self._expect()
        self._in_message = True
        self._in_body = False
        self._header_bytes = 0
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        if error := self._objection():
            self._refuse(error)
            return
        self._tail = _cancelled(self._tail)
        super().on_headers_complete()
        self._in_body = True
        if self._ending:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body:
            self._refuse(self._too_large())
            return
        self._held += len(body)
        self._intake.held += len(body)
        if self._intake.full:
            self._refuse(self._too_many_bodies())
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused:
            return
        super().on_message_complete()
        self._in_message = False
        self._arrival = _cancelled(self._arrival)

    # -- uvicorn's own calls

    def on_response_complete(self) -> None:
        self._release_body()
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._tail = self.loop.call_later(self._limits.slow_client_s, self._check_tail)
        if self._ending:
            self._say_farewell()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Unsupported(msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._times = cast(Scope, cycle.scope)[TIMES]
        super()._start_asgi_task(cycle, app)

    # -- the router's end

    def shutdown(self) -> None:
        """Close the connection after one more response. uvicorn's own would cut a request on its way."""
        self._ending = True
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False  # its response says so
        elif self.cycle is None or self.cycle.response_complete:
            self._say_farewell()

    def _say_farewell(self) -> None:
        _cancelled(self._farewell)
        self._farewell = self.loop.call_later(LAST_REQUEST_S, self._close_unused)

    def _close_unused(self) -> None:
        """Close, unless a request arrives or is served: then its response closes."""
        if not self._in_message and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()

    # -- refusals

    def _objection(self) -> RequestFailed | None:
        """Return the reason to refuse a request by its headers, before its body is read; None if fine."""
        if self._header_bytes > MAX_HEADER_BYTES:
            return _too_many_headers()
        if self.parser.get_method() != b"POST":
            return None  # health and metrics stay available
        for name, value in self.headers:
            if name == b"content-length" and int(value) > self._limits.max_body:
                return self._too_large()
        if len(self.connections) > self._limits.max_connections:
            return Overloaded(
                f"the router has {self._limits.max_connections} connections already (router.max_connections)",
                RETRY_AFTER_S,
            )
        return None

    def _too_large(self) -> TooLarge:
        mib = self._limits.max_body / (1 << 20)
        return TooLarge(f"the request's body exceeds {mib:g} MiB (router.max_body_mib)")

    def _too_many_bodies(self) -> Overloaded:
        mib = self._intake.limit / (1 << 20)
        return Overloaded(
            f"the bodies of all requests exceed {mib:g} MiB ({BODIES_AT_ONCE} times router.max_body_mib)",
            RETRY_AFTER_S,
        )

    def _refuse(self, error: RequestFailed) -> None:
        """Respond in the application's stead, and accept nothing more on this connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._on_refused(str(error.status.value))
        self._arrival = _cancelled(self._arrival)
        self._release_body()
        own = self.cycle if self._in_body else None
        before = self._running if self._running is not own else None
        if (before and not before.response_complete) or (own and own.response_started):
            self.transport.abort()  # another response is under way: an error cannot follow inside it
            return
        _abandon(own)
        url: bytes = getattr(self, "url", b"")  # none before a first request
        anthropics = is_anthropics(url.decode("latin-1").partition("?")[0], self.headers or ())
        self.transport.write(_raw(error, anthropics=anthropics))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._draining = self.loop.call_later(LINGER_S, self.transport.abort)

    def _release_body(self) -> None:
        self._intake.held -= self._held
        self._held = 0

    # -- clients that are too slow

    def _expect(self) -> None:
        """Begin to time the arrival of a request."""
        self._received = 0
        self._arrival_began = self.loop.time()
        self._arrival = self.loop.call_later(self._limits.slow_client_s, self._check_arrival)

    def _check_arrival(self) -> None:
        answering = self._running is not None and not self._running.response_complete
        if self.flow.read_paused or (answering and not self._in_message):
            left = self._limits.slow_client_s  # the delay is not the client's
        else:
            allowed = self._limits.slow_client_s + self._received / LEAST_SENT_PER_S
            left = self._arrival_began + allowed - self.loop.time()
        if left > 0:
            self._arrival = self.loop.call_later(left, self._check_arrival)
        else:
            self._refuse(TooSlow(f"the request was not complete after {self._limits.slow_client_s:g} s"))

    def _watch_draining(self) -> None:
        _cancelled(self._draining)
        before = self.transport.get_write_buffer_size()
        self._draining = self.loop.call_later(self._limits.slow_client_s, self._check_draining, before)

    def _check_draining(self, before: int) -> None:
        """Cut a client that has read too little. While the response waits, only its reads free the buffer."""
        read = before - self.transport.get_write_buffer_size()
        if read < LEAST_READ_PER_S * self._limits.slow_client_s:
            self._cut("unread")
        else:
            self._watch_draining()

    def _check_tail(self) -> None:
        """Cut a client that has not read a finished response's last bytes: they are few."""
        if self.transport.get_write_buffer_size():
            self._cut("unread")

    def _cut(self, reason: str) -> None:
        self._on_refused(reason)
        self.transport.abort()


@dataclass(frozen=True)
class Connections:
    """The factory by which uvicorn makes each connection's protocol."""

    limits: HttpLimits
    intake: Intake
    refused: OnRefused

    def __call__(self, **uvicorn: Any) -> LimitedConnection:
        return LimitedConnection(limits=self.limits, intake=self.intake, refused=self.refused, **uvicorn)


def connections(limits: HttpLimits, refused: OnRefused) -> Connections:
    """Return what makes the connections of a router, all within these limits."""
    return Connections(limits, Intake(BODIES_AT_ONCE * limits.max_body), refused)


def affordable_connections(wanted: int) -> int:
    """Return `wanted`, or as many connections as file descriptors allow; raise their limit if need be.

    Without a descriptor no client can be accepted and no worker reached: clients would wait in vain.
    """
    beside = SPARE_CONNECTIONS + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + beside:
        soft = min(wanted + beside, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fits = max(1, min(wanted, soft - beside))
    if fits < wanted:
        log.warning(
            "router.max_connections is %d, but %d file descriptors (ulimit -n) are enough for %d clients: "
            "that is the limit now",
            wanted,
            soft,
            fits,
        )
    return fits


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel the timer; return None for the attribute that held it."""
    if timer is not None:
        timer.cancel()
    return None


def _abandon(cycle: RequestResponseCycle | None) -> None:
    """Let the application see that its client has left."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _too_many_headers() -> HeadersTooLarge:
    return HeadersTooLarge(f"the request's headers exceed {MAX_HEADER_BYTES} bytes")


def _raw(error: RequestFailed, *, anthropics: bool) -> bytes:
    start, body = error_response(error, anthropics=anthropics)
    headers = [b"%s: %s\r\n" % header for header in start["headers"]]
    return b"".join([STATUS_LINE[start["status"]], *headers, b"connection: close\r\n\r\n", body["body"]])
