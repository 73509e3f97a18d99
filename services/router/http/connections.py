"""A router's HTTP connections: uvicorn's, with limits on the size and the pace of requests.

The limits cost nothing per token, and a few comparisons per request. At any moment a connection is waiting
for one thing (Phase), and a timer limits the wait:

    REQUEST   the rest of a request      slow_client_s, more for a body sent at LEAST_SENT_PER_S: then 408
    ANSWER    the application            it has its own deadlines
    READING   the client to read         LEAST_READ_PER_S in each slow_client_s: otherwise it is cut
    NEXT      another request            keep_alive_s: then it is closed; first one: slow_client_s, then 408
    END       the client to close        LINGER_S without a byte, slow_client_s in all: then it is cut

Limits:

    too many connections          503; far above the limit the connection is dropped without a response
    headers and trailers          431 if they are too large; chunk extensions and empty lines count
    a body that is too large      413, before it is read if its length is declared
    all bodies together           503 for the largest one still arriving; a body counts until its
                                  response is complete, or its connection ends
    a body after an early answer  discarded if it is short; otherwise the connection ends
    a router that is ending       each connection may send one more request, for LAST_REQUEST_S

Uses undocumented parts of uvicorn: uvicorn.protocols.http.httptools_impl (HttpToolsProtocol: its transport
and parser callbacks, on_response_complete, which ours copies, _start_asgi_task, cycle, pipeline, connections,
flow; RequestResponseCycle: transport, keep_alive, disconnected, message_event, response_started,
response_complete); and httptools.HttpParserUpgrade (its argument is where the parser stopped).
"""

from __future__ import annotations

import asyncio
import socket
import time
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.addresses import unmapped
from baton.services.router.errors import RequestFailed, Unsupported
from baton.services.router.http.admission import TIMES
from baton.services.router.http.connection_parts import OnRefused, Outlet, Phase, abandon, raw, readable
from baton.services.router.http.forms import is_anthropics
from baton.services.router.http.limits import (
    MAX_HEADER_BYTES,
    SPARE_CONNECTIONS,
    HttpLimits,
    objection,
    too_large,
    too_many_bodies,
    too_many_headers,
)
from baton.services.router.timings import HttpTimes

# bytes/s: a request may take slow_client_s, and as much longer as it needs at this rate.
LEAST_SENT_PER_S = 16 << 10
LEAST_READ_PER_S = 1 << 10  # bytes/s, once a response has filled the connection's buffers
FRAMING = 16  # framing bytes allowed per byte of a chunked body; a one-byte chunk has five
# The kernel's buffer per connection. By default it grows to megabytes for a client that does not read, and
# reports progress only when a third is free: a slow client must read at least that much in slow_client_s.
SEND_BUFFER_BYTES = 64 << 10
WRITE_BUFFER_BYTES = 16 << 10  # our own buffer per connection; when full, the response waits for the client
LINGER_S = 2.0  # silence before an ending connection is cut; if cut at once, the client may miss its response
LINGER_BYTES = 64 << 20  # bytes that the client of an ending connection may still send
BODIES_AT_ONCE = 8  # bodies of the largest size held at once; more if they are smaller
SHORT_BODY_BYTES = 64 << 10  # longest body after an early answer for which the connection stays open
MAX_PIPELINED = 32  # complete requests that wait for an earlier response
# How long a router that is ending still reads from each connection: a request may be in flight, and a client
# that reuses its connection sends the next one at once.
LAST_REQUEST_S = 0.5


class LimitedConnection(HttpToolsProtocol):
    """One client's connection, with one request after another.

    The phase is derived from the other fields: call `_settle` when it may have changed.
    """

    def __init__(self, all_connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._all = all_connections
        self._limits = all_connections.limits
        self._on_refused = all_connections.refused
        self._running: RequestResponseCycle | None = None  # the current response, or the last one
        self._over = False  # further input is discarded
        self._in_message = False  # between a request's first and last byte
        self._in_body = False  # between the end of a request's headers and the next request
        self._header_bytes = 0
        self._body_bytes = 0
        self._raw = 0  # bytes read since a request began, or since the last one was complete
        self._arrival_began = 0.0  # loop time
        self._held: dict[RequestResponseCycle, int] = {}  # counted bytes of bodies, by request
        self._lasting = True  # keep the connection after the response
        self._ending = False  # the router is ending: the next response is the last one
        self._phase = Phase.NEXT
        self._since = 0.0  # loop time when the phase began, or was last checked (READING)
        self._unread = 0  # bytes that the client had not read at `_since`
        self._heard = 0.0  # loop time of the last discarded byte
        self._timer: asyncio.TimerHandle | None = None
        self._times = HttpTimes()  # the current response's times
        self._paused = 0.0  # time.monotonic when the response began to wait for its client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._outlet = Outlet(transport, self._finish)
        if self.client is not None:
            self.client = unmapped(self.client[0]), self.client[1]
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._since = self.loop.time()
        self._arm(self._limits.slow_client_s)
        if len(self.connections) > self._limits.max_connections + SPARE_CONNECTIONS:
            self._over = True
            self._cut("dropped")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        self._release_all()
        abandon(self._running)  # if requests are pipelined, uvicorn notifies only the last one

    def data_received(self, data: bytes) -> None:
        self._raw += len(data)
        if self._over:
            self._heard = self.loop.time()
            if self._raw > LINGER_BYTES:
                self.transport.abort()
            return
        self._parse(data)
        if self._raw > MAX_HEADER_BYTES and not self._over:
            framed = (FRAMING + 1) * self._body_bytes + 2 * MAX_HEADER_BYTES  # including the headers
            if not (self._in_message and self._in_body) or self._raw > framed:
                self._refuse(too_many_headers())
        self._settle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused = time.monotonic()
        self._settle()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._times.paused_s += time.monotonic() - self._paused
        self._settle()

    def _parse(self, data: bytes) -> None:
        while data and not self._over:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(Unsupported("Invalid HTTP request received."))
                return

    def _head_without_upgrade(self) -> bytes:
        """Return the request's head without its upgrade, to parse it again: the parser would ignore the body.

        Java's HTTP client asks for h2c with each plain-text request.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s\r\n" % one for one in self.headers if one[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"".join([*lines, b"\r\n"])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(Scope, self.scope)[TIMES] = HttpTimes()
        self._arrival_began = self.loop.time()
        self._in_message = True
        self._in_body = False
        self._header_bytes = self._body_bytes = self._raw = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if not self._in_body:  # trailers must not join the headers
            super().on_header(name, value)
        elif self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(too_many_headers())

    def on_headers_complete(self) -> None:
        if self._over or self._upgrades():
            return
        if error := self._objection():
            self._refuse(error)
            return
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, self._outlet)
        self._in_body = True
        self._lasting = self.cycle.keep_alive
        if self.expect_100_continue or not self._body_is_short():
            self.cycle.keep_alive = False  # until the body is complete: an earlier answer ends the connection
        if self._ending:
            self._lasting = self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._over:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body:
            self._refuse(too_large(self._limits))
            return
        if self.cycle.response_complete:
            return  # discard the rest of the body
        self._held[self.cycle] = self._held.get(self.cycle, 0) + len(body)
        self._all.held += len(body)
        while self._all.held > self._all.limit and not self._over:
            self._refuse_largest()
        if not self._over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrades():
            return
        self._in_message = False
        self._raw = 0
        if self._over:
            return
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._lasting and not self._ending
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self._running is not None:
            self._release(self._running)
        if self._over or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._settle()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._times = cast(Scope, cycle.scope)[TIMES]
        super()._start_asgi_task(cycle, app)

    def shutdown(self) -> None:
        """Close the connection after one more response. uvicorn's way would lose a request in flight."""
        self._ending = True
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False  # the response tells the client
        self._since = self.loop.time()
        self._arm(LAST_REQUEST_S)

    def _objection(self) -> RequestFailed | None:
        if self._header_bytes > MAX_HEADER_BYTES:
            return too_many_headers()
        if len(self.pipeline) >= MAX_PIPELINED:
            return Unsupported(f"more than {MAX_PIPELINED} requests wait on one connection")
        method = self.parser.get_method()
        if method == b"CONNECT":
            return Unsupported("CONNECT is for proxies, and this is not one")
        if method != b"POST":
            return None  # health and metrics stay available
        return objection(self._limits, self.headers, len(self.connections))

    def _upgrades(self) -> bool:
        """Return whether the parser would hand over the connection; CONNECT is refused anyway."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _body_is_short(self) -> bool:
        for name, value in self.headers:
            if name == b"transfer-encoding":
                return False
            if name == b"content-length" and int(value) > SHORT_BODY_BYTES:
                return False
        return True

    def _refuse(self, error: RequestFailed) -> None:
        """Respond in place of the application, and accept nothing more on this connection."""
        if self._over:
            return
        if self.transport.is_closing():  # its client has left
            self._over = True
            self._release_all()
            return
        self._on_refused(str(error.status.value))
        own = self.cycle if self._in_message and self._in_body else None
        if self._answering and (self._running is not own or self._running.response_started):  # type: ignore[union-attr]
            self._over = True
            self._release_all()
            self.transport.abort()  # another response is under way: an error cannot be inserted into it
            return
        if own is None or not own.response_complete:
            abandon(own)
            self.transport.write(raw(error, anthropics=self._is_anthropics))
        self._finish()

    @property
    def _is_anthropics(self) -> bool:
        url: bytes = getattr(self, "url", b"")  # not set before the first request
        return is_anthropics(url.decode("latin-1").partition("?")[0], self.headers or ())

    def _refuse_largest(self) -> None:
        """Refuse the largest body still arriving, so that a few large, slow bodies cannot shut out others."""
        others = (one for one in self.connections if isinstance(one, LimitedConnection))
        largest = max(others, key=lambda one: one.arriving, default=self)
        if largest.arriving <= self.arriving:
            largest = self
        largest._refuse(too_many_bodies(self._limits, self._all.limit))

    @property
    def arriving(self) -> int:
        return self._held.get(self.cycle, 0) if self._in_message and not self._over else 0

    def _finish(self) -> None:
        """Discard further input, and end the connection once the client has read the response."""
        if self._over or self.transport.is_closing():
            return
        self._over = True
        self._raw = 0
        self._heard = self.loop.time()
        self._release_all()
        self.pipeline.clear()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._settle()

    def _release(self, cycle: RequestResponseCycle) -> None:
        self._all.held -= self._held.pop(cycle, 0)

    def _release_all(self) -> None:
        self._all.held -= sum(self._held.values())
        self._held.clear()

    def _cut(self, reason: str) -> None:
        self._on_refused(reason)
        self.transport.abort()

    @property
    def _answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _now(self) -> Phase:
        answering = self._answering and not self._over
        if self.flow.write_paused or (not answering and self.transport.get_write_buffer_size()):
            return Phase.READING
        if self._over:
            return Phase.END
        if self._in_message:
            return Phase.REQUEST
        return Phase.ANSWER if answering else Phase.NEXT

    def _settle(self) -> None:
        phase = self._now()
        if phase is not self._phase:
            self._phase = phase
            self._since = self.loop.time()
            self._unread = self.transport.get_write_buffer_size()
            self._arm(self._left())

    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(max(0.0, seconds), self._tick)

    def _left(self) -> float:
        limits, now = self._limits, self.loop.time()
        match self._phase:
            case Phase.REQUEST:
                if self.flow.read_paused:
                    self._arrival_began = now  # we paused reading: the delay is ours
                return self._arrival_began + limits.slow_client_s + self._raw / LEAST_SENT_PER_S - now
            case Phase.NEXT:
                between = limits.slow_client_s if self.cycle is None else limits.keep_alive_s
                return self._since + (LAST_REQUEST_S if self._ending else between) - now
            case Phase.END:
                return min(self._since + limits.slow_client_s, self._heard + LINGER_S) - now
            case Phase.READING:
                return self._since + limits.slow_client_s - now
        return limits.slow_client_s

    def _tick(self) -> None:
        self._settle()
        left = self._left()
        if left <= 0:
            left = self._limits.slow_client_s
            self._expire()
        elif self.transport.is_closing() and self._phase is not Phase.READING:
            self.transport.abort()
        self._arm(left)

    def _expire(self) -> None:
        match self._phase:
            case Phase.REQUEST:
                self._refuse(self._too_slow())
            case Phase.READING:
                self._look_at_reader()
            case Phase.NEXT if readable(self.transport):
                pass  # a request has arrived, and closing now would lose it
            case Phase.NEXT if self.cycle is None and not self._ending:
                self._refuse(self._too_slow())
            case Phase.NEXT:
                self.transport.close()
            case _:
                self.transport.abort()

    def _look_at_reader(self) -> None:
        """Disconnect a client that reads too slowly: while the response waits, only reads free the buffer."""
        unread, now = self.transport.get_write_buffer_size(), self.loop.time()
        if self._unread - unread < LEAST_READ_PER_S * (now - self._since):
            self._cut("unread")
        self._unread, self._since = unread, now

    def _too_slow(self) -> RequestFailed:
        why = f"the request was not complete after {self._limits.slow_client_s:g} s"
        return RequestFailed(why, status=HTTPStatus.REQUEST_TIMEOUT)


class Connections:
    """Makes the protocol of each connection for uvicorn. All connections share these limits."""

    def __init__(self, limits: HttpLimits, refused: OnRefused) -> None:
        self.limits = limits
        self.refused = refused
        self.limit = BODIES_AT_ONCE * limits.max_body  # bytes of all bodies
        self.held = 0  # bytes of all bodies that are being read or processed

    def __call__(self, **uvicorn: Any) -> LimitedConnection:
        return LimitedConnection(self, **uvicorn)
