"""The puller's connections, kept for later pulls."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from baton import addresses, rpc
from baton.handoff.channels import Channels
from baton.handoff.errors import TransportFailed
from baton.handoff.frames import GREETING, Line
from baton.handoff.transports.base import Pull
from baton.protos.handoff_pb2 import ConnectReply, ConnectRequest

_KEPT = 6  # idle connections per source: as many as a rank has concurrent pulls
_SOURCES = 64  # maximum sources with idle connections
_CONNECT_S = 5.0
_LOOK_S = 0.25


@dataclass
class _Kept:
    """A source's idle connections, and the certificate with which they were made."""

    credentials: object
    lines: deque[Line] = field(default_factory=deque)


class Lines:
    """Cache connections, because making one takes a call and a greeting. Thread-safe."""

    def __init__(self) -> None:
        self._channels = Channels()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._closed = False

    def kept(self, address: str) -> Line | None:
        """Return an idle connection that the source has not closed, or None."""
        while (line := self._take(address)) is not None:
            if line.peek() is False:
                return line
            line.close()
        return None

    def give_back(self, address: str, line: Line) -> None:
        with self._lock:
            kept = self._of(address)
            if not self._closed and len(kept.lines) < _KEPT:
                kept.lines.append(line)
                return
        line.close()

    def make(self, pull: Pull) -> tuple[Line, bytes]:
        """Return a new connection, and the greeting to send on it first. Raises HandoffError."""
        reply = self._invited(pull)
        host, _ = addresses.split(pull.shard.address)
        connection = _connected(pull, host, reply.port)
        try:
            if reply.here_key:
                from baton.security.sealing import Seal

                line = Line(connection, Seal(reply.there_key), Seal(reply.here_key))
            elif self._channels.credentials is not None:
                raise TransportFailed(f"{pull.what}: the source would send it in plain text")
            else:
                line = Line(connection)
        except BaseException:
            connection.close()
            raise
        return line, GREETING + reply.session

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        with self._lock:
            self._closed = True
            lines = [line for kept in self._kept.values() for line in kept.lines]
            self._kept.clear()
        for line in lines:
            line.close()
        self._channels.close()

    def _take(self, address: str) -> Line | None:
        with self._lock:
            lines = self._of(address).lines
            return lines.pop() if lines else None  # most recently used first, so that others time out

    def _of(self, address: str) -> _Kept:
        """Return a source's idle connections, without those of an older certificate."""
        credentials = self._channels.credentials
        kept = self._kept.pop(address, None)
        if kept is None or kept.credentials is not credentials:
            for line in kept.lines if kept else ():
                line.close()
            kept = _Kept(credentials)
        self._kept[address] = kept
        while len(self._kept) > _SOURCES:
            for line in self._kept.popitem(last=False)[1].lines:
                line.close()
        return kept

    def _invited(self, pull: Pull) -> ConnectReply:
        call = self._channels.stub(pull.shard.address).Connect.future(
            ConnectRequest(), timeout=min(_CONNECT_S, max(0.0, pull.deadline - time.monotonic()))
        )
        pull.cancellation.call(call.cancel)
        try:
            reply: ConnectReply = call.result()
        except grpc.FutureCancelledError:
            pull.check_time()
            raise TransportFailed(f"{pull.what}: the call for a connection was cancelled") from None
        except grpc.RpcError as error:
            pull.check_time()
            details = error.details() or ""
            meaning = rpc.tls_problem(details)
            raise TransportFailed(
                f"{pull.what}: {error.code().name}: {details}{f' ({meaning})' if meaning else ''}"
            ) from None
        return reply


def _connected(pull: Pull, host: str, port: int) -> socket.socket:
    """Return a connected socket. Raises TransportFailed, PullTimeout, PullCancelled."""
    problem = f"{pull.what}: no connection to port {port}, from which records are sent"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportFailed(f"{problem}: {error.strerror}") from None
    last = "no address"
    ends_s = time.monotonic() + _CONNECT_S
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
        try:
            why = _wait(connection, address, ends_s, pull.check_time)
        except BaseException:
            connection.close()
            raise
        if not why:
            return connection
        connection.close()
        last = why
    raise TransportFailed(
        f"{problem}: {last}; is it open between the workers (handoff.port and the next one)?"
    )


def _wait(
    connection: socket.socket, address: tuple[object, ...], ends_s: float, look: Callable[[], None]
) -> str:
    """Connect a non-blocking socket. Return the error's text; empty on success."""
    code = connection.connect_ex(address)
    if code == errno.EINPROGRESS:
        poller = select.poll()
        poller.register(connection, select.POLLOUT)
        while not poller.poll(_LOOK_S * 1e3):
            look()
            if time.monotonic() > ends_s:
                return f"no answer within {_CONNECT_S:g} s"
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return os.strerror(code) if code else ""
