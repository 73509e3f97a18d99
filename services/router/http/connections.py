"""A router's HTTP connections: uvicorn's, with bounds on what a client may send, and on how slowly.

Nothing here costs anything a token. A client that keeps its limits meets a few comparisons a request.

    too many connections        503, and far above the bound an end without a word
    headers that never end      408, or 431 where they are too many
    a body that is too large    413, before it is read where its length is told, else as soon as it is seen
    a body that never ends      408
    an answer that is not read  the connection is cut: the request is aborted as for any client that leaves

Leans on: uvicorn.protocols.http.httptools_impl (HttpToolsProtocol: its callbacks of transport and parser,
_start_asgi_task, cycle, connections, flow; RequestResponseCycle: disconnected, message_event, more_body,
response_started, response_complete; STATUS_LINE).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton.services.router.errors import (
    HeadersTooLarge,
    Overloaded,
    RequestFailed,
    TooLarge,
    TooSlow,
    Unsupported,
)
from baton.services.router.http.admission import error_response

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10  # with the request's first line
# A request may take slow_client_s, and as much longer as it takes at this rate (bytes/s).
LEAST_SENT_PER_S = 16 << 10
LEAST_READ_PER_S = 1 << 10  # bytes/s, of an answer that its connection has no room for
# Refused connections that may wait for their 503; more than these are dropped: file descriptors are finite.
SPARE_CONNECTIONS = 256
OWN_DESCRIPTORS = 512  # of the router beside its clients: workers, scheduler, files
# Of the kernel, a connection. Left to itself it takes megabytes for who does not read, and is seen to move
# again only when a third is free: so that much is the least that a slow client must read in slow_client_s.
SEND_BUFFER_BYTES = 64 << 10
WRITE_BUFFER_BYTES = 16 << 10  # of ours, beside it, a connection; above it an answer waits for its reader
LINGER_S = 2.0  # a refused client may go on sending for this long: cut at once it would not see the answer
BODIES_AT_ONCE = 8  # largest bodies that may be in memory; more and smaller ones in proportion
RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class HttpLimits:
    """What every client is held to."""

    max_body: int  # bytes
    max_connections: int
    slow_client_s: float


# Told of each client that is refused: the answer's status, or "dropped" (too many connections, no answer) or
# "unread" (the answer was not read).
Refused = Callable[[str], None]


class Intake:
    """Bytes of all bodies that are being read or answered. One for all connections of a router."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    @property
    def full(self) -> bool:
        return self.held > self.limit


class LimitedConnection(HttpToolsProtocol):
    """One client's connection; its requests come one after the other."""

    def __init__(self, *, limits: HttpLimits, intake: Intake, refused: Refused, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._intake = intake
        self._tell_refused = refused
        self._running: RequestResponseCycle | None = None  # whose answer is being made
        self._refused = False
        self._in_message = False  # from a request's first byte to its last
        self._in_body = False  # from its headers' end on, until the next one begins
        self._header_bytes = 0
        self._body_bytes = 0
        self._held = 0  # of the intake
        self._received = 0  # bytes since the arrival began
        self._arrival_began = 0.0  # the loop's time
        self._arrival: asyncio.TimerHandle | None = None  # of the request that is not whole yet
        self._draining: asyncio.TimerHandle | None = None  # of an answer that waits for its reader
        self._tail: asyncio.TimerHandle | None = None  # of what is left to read of one that is made

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
        self._release_body()
        _abandon(self._running)  # with requests in a row uvicorn tells the last one alone

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
        self._watch_draining()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._draining = _cancelled(self._draining)

    # -- the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
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
            self._refuse(Overloaded("the router reads too many large requests already", RETRY_AFTER_S))
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

    def send_400_response(self, msg: str) -> None:
        self._refuse(Unsupported(msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # -- what is refused

    def _objection(self) -> RequestFailed | None:
        """Why the request whose headers are here is not even read."""
        if self._header_bytes > MAX_HEADER_BYTES:
            return _too_many_headers()
        if self.parser.get_method() != b"POST":
            return None  # how the router fares can be asked always
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

    def _refuse(self, error: RequestFailed) -> None:
        """Answer in the application's stead, and listen to nothing more on this connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._tell_refused(str(error.status.value))
        self._arrival = _cancelled(self._arrival)
        self._release_body()
        own = self.cycle if self._in_body else None
        before = self._running if self._running is not own else None
        if (before and not before.response_complete) or (own and own.response_started):
            self.transport.abort()  # an answer is on its way, in whose middle another cannot follow
            return
        _abandon(own)
        self.transport.write(_raw(error))
        self.transport.write_eof()
        self.flow.resume_reading()
        self._draining = self.loop.call_later(LINGER_S, self.transport.abort)

    def _release_body(self) -> None:
        self._intake.held -= self._held
        self._held = 0

    # -- who is too slow

    def _expect(self) -> None:
        """From now on a request arrives."""
        self._received = 0
        self._arrival_began = self.loop.time()
        self._arrival = self.loop.call_later(self._limits.slow_client_s, self._check_arrival)

    def _check_arrival(self) -> None:
        answering = self._running is not None and not self._running.response_complete
        if self.flow.read_paused or (answering and not self._in_message):
            left = self._limits.slow_client_s  # it is not the client that is waited for
        else:
            allowed = self._limits.slow_client_s + self._received / LEAST_SENT_PER_S
            left = self._arrival_began + allowed - self.loop.time()
        if left > 0:
            self._arrival = self.loop.call_later(left, self._check_arrival)
        else:
            self._refuse(TooSlow(f"the request was not whole after {self._limits.slow_client_s:g} s"))

    def _watch_draining(self) -> None:
        _cancelled(self._draining)
        before = self.transport.get_write_buffer_size()
        self._draining = self.loop.call_later(self._limits.slow_client_s, self._check_draining, before)

    def _check_draining(self, before: int) -> None:
        """Nothing is written meanwhile: what is missing was read."""
        read = before - self.transport.get_write_buffer_size()
        if read < LEAST_READ_PER_S * self._limits.slow_client_s:
            self._cut("unread")
        else:
            self._watch_draining()

    def _check_tail(self) -> None:
        """The answer's last bytes are few: who has not read them by now will not."""
        if self.transport.get_write_buffer_size():
            self._cut("unread")

    def _cut(self, why: str) -> None:
        self._tell_refused(why)
        self.transport.abort()


def connections(limits: HttpLimits, refused: Refused) -> Callable[..., LimitedConnection]:
    """What uvicorn makes a connection's protocol with."""
    intake = Intake(BODIES_AT_ONCE * limits.max_body)

    def connection(**uvicorn: Any) -> LimitedConnection:
        return LimitedConnection(limits=limits, intake=intake, refused=refused, **uvicorn)

    return connection


def affordable_connections(wanted: int) -> int:
    """`wanted`, or as many as the process may have file descriptors for, whose limit is raised if it can be.

    Without one a client's connection cannot be accepted, nor a worker reached: it would wait for nothing.
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
            "that many are taken",
            wanted,
            soft,
            fits,
        )
    return fits


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer any more: what the attribute is to hold then."""
    if timer is not None:
        timer.cancel()
    return None


def _abandon(cycle: RequestResponseCycle | None) -> None:
    """The application sees that its client left."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _too_many_headers() -> HeadersTooLarge:
    return HeadersTooLarge(f"the request's headers exceed {MAX_HEADER_BYTES} bytes")


def _raw(error: RequestFailed) -> bytes:
    start, body = error_response(error)
    headers = [b"%s: %s\r\n" % header for header in start["headers"]]
    return b"".join([STATUS_LINE[start["status"]], *headers, b"connection: close\r\n\r\n", body["body"]])
