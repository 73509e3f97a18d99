"""Small parts that connections.py uses: phases, a transport, raw error responses.

Uses undocumented parts of uvicorn: uvicorn.protocols.http.httptools_impl (RequestResponseCycle: disconnected,
message_event, response_complete; STATUS_LINE).
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from enum import Enum, auto

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from baton.services.router.errors import RequestFailed, UnreadableBody
from baton.services.router.http.forms import error_response

# Called for each refused client with the response's status, "dropped" (too many connections, no response) or
# "unread" (the client did not read its response).
OnRefused = Callable[[str], None]


class Phase(Enum):
    """The event that a connection is waiting for; see connections.py."""

    REQUEST = auto()
    ANSWER = auto()
    READING = auto()
    NEXT = auto()
    END = auto()


class Outlet:
    """A connection's transport for responses: `close` first lets the client read everything."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def readable(transport: asyncio.Transport) -> bool:
    """Return whether bytes have arrived that the loop has not read yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def abandon(cycle: RequestResponseCycle | None) -> None:
    """Tell the application that its client has left."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def raw(error: RequestFailed, *, anthropics: bool = False) -> bytes:
    """Return the bytes of an error response that ends its connection."""
    start, body = error_response(error, anthropics=anthropics)
    headers = [b"%s: %s\r\n" % header for header in start["headers"]]
    if isinstance(error, UnreadableBody):
        headers.append(error.accepted + b"\r\n")
    return b"".join([STATUS_LINE[start["status"]], *headers, b"connection: close\r\n\r\n", body["body"]])
