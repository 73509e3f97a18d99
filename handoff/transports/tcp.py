"""The transport tcp receives records over a TCP connection (frames.py)."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import grpc
import numpy as np

from baton import addresses, rpc
from baton.handoff.channels import HandoffClient
from baton.handoff.errors import HandoffError, TransportFailed, named
from baton.handoff.frames import (
    FAIL,
    FRAME_BYTES,
    GREETING,
    MOST_RECORDS,
    PULL,
    RECORDS,
    WAIT,
    Broken,
    Frame,
    Line,
)
from baton.handoff.records import Bytes, Records
from baton.handoff.transports.base import Pull, SavedShard, Transport
from baton.protos.handoff_pb2 import ConnectReply, ConnectRequest, PullRequest, Shard

_BUFFERS = 4  # kept for later pulls, because fresh memory costs as much as the transfer
_KEEP_BYTES = 16 << 20  # larger buffers are not kept
_KEPT = 6  # idle connections per source: as many as a rank has concurrent pulls
_SOURCES = 64  # maximum sources with idle connections
_CONNECT_S = 5.0
_LOOK_S = 0.25


class Tcp(Transport):
    name: ClassVar[str] = "tcp"
    windows: ClassVar[bool] = True

    def __init__(self) -> None:
        self._lines = Lines()
        self._buffers: list[Bytes] = []
        self._lock = threading.Lock()

    def offer(self, saved: SavedShard) -> bytes:
        del saved
        return b""  # the shard's address is enough

    def reaches(self, shard: Shard) -> bool:
        return self.name in shard.offers and bool(shard.address)

    def pull(self, pull: Pull) -> Iterator[Records]:
        pull.check_time()
        most = min(
            pull.records_a_chunk, max(1, FRAME_BYTES // pull.record_bytes), MOST_RECORDS, pull.num_blocks
        )
        buffer = self._buffer(most * pull.record_bytes)
        address, reusable = pull.shard.address, False
        request = Frame(PULL, _request(pull, most).SerializeToString())
        line, greeting = self._lines.kept(address), b""
        try:
            frame = _asked(pull, line, request) if line is not None else None
            if line is None or frame is None:
                line, greeting = self._lines.make(pull)
                line.send(request, look=pull.check_time, before=greeting)
                frame = _next(pull, line)
            yield from _records(pull, line, frame, buffer, most)
            reusable = True
        except _Refused as refused:
            reusable = True
            raise refused.error from None
        except Broken as error:
            pull.check_time()
            raise TransportFailed(f"{pull.what}: {error}") from None
        finally:
            if line is not None:
                if reusable:
                    self._lines.give_back(address, line)
                else:
                    line.close()
            self._keep(buffer)

    def close(self) -> None:
        self._lines.close()

    def _buffer(self, size: int) -> Bytes:
        with self._lock:
            for number, buffer in enumerate(self._buffers):
                if buffer.size >= size:
                    return self._buffers.pop(number)
        return np.empty(size, np.uint8)

    def _keep(self, buffer: Bytes) -> None:
        with self._lock:
            if buffer.size <= _KEEP_BYTES:
                self._buffers.append(buffer)
                del self._buffers[:-_BUFFERS]


class _Refused(Exception):
    """An error that the source sent; the connection stays usable."""

    def __init__(self, error: HandoffError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class _Kept:
    """A source's idle connections, and the certificate with which they were made."""

    credentials: object
    lines: deque[Line] = field(default_factory=deque)


class Lines:
    """Cache connections, because making one takes a call and a greeting. Thread-safe."""

    def __init__(self) -> None:
        self._client = HandoffClient()
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
            elif self._client.channels.credentials is not None:
                raise TransportFailed(f"{pull.what}: the source would send it in plain text")
            else:
                line = Line(connection)
        except BaseException:
            connection.close()
            raise
        return line, GREETING + reply.session

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lines = [line for kept in self._kept.values() for line in kept.lines]
            self._kept.clear()
        for line in lines:
            line.close()
        self._client.close()

    def _take(self, address: str) -> Line | None:
        with self._lock:
            lines = self._of(address).lines
            return lines.pop() if lines else None  # most recently used first, so that others time out

    def _of(self, address: str) -> _Kept:
        """Return a source's idle connections, without those of an older certificate."""
        credentials = self._client.channels.credentials
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
        call = self._client.call("Connect", pull.shard.address, ConnectRequest(), _CONNECT_S)
        try:
            while True:
                with contextlib.suppress(grpc.FutureTimeoutError):
                    reply: ConnectReply = call.result(_LOOK_S)
                    return reply
                pull.check_time()
        except grpc.FutureCancelledError:
            raise TransportFailed(f"{pull.what}: the call for a connection was cancelled") from None
        except grpc.RpcError as error:
            details = error.details() or ""
            meaning = rpc.tls_problem(details)
            raise TransportFailed(
                f"{pull.what}: {error.code().name}: {details}{f' ({meaning})' if meaning else ''}"
            ) from None
        finally:
            call.cancel()


def _request(pull: Pull, most: int) -> PullRequest:
    return PullRequest(
        request_id=pull.request_id,
        epoch=pull.epoch,
        rank=pull.shard.rank,
        first_block=pull.first_block,
        num_blocks=pull.num_blocks,
        ticket=pull.shard.ticket,
        at_once=most,
    )


def _asked(pull: Pull, line: Line, request: Frame) -> Frame | None:
    """Send a request on an idle connection, and return the first frame; None if the connection is broken."""
    try:
        line.send(request, look=pull.check_time)
        return _next(pull, line)
    except Broken:
        line.close()
        pull.check_time()
        return None


def _next(pull: Pull, line: Line) -> Frame:
    """Return the next frame that is not a keepalive. Raises _Refused."""
    while (frame := line.receive(pull.check_time)).kind == WAIT:
        pull.check_time()
    if frame.kind == FAIL:
        name, _, text = frame.head.decode(errors="replace").partition("\n")
        raise _Refused(named(name)(text))
    return frame


def _records(pull: Pull, line: Line, frame: Frame, buffer: Bytes, most: int) -> Iterator[Records]:
    expected, stop = pull.first_block, pull.first_block + pull.num_blocks
    while True:
        count = frame.records
        right = frame.kind == RECORDS and frame.first_block == expected
        if not right or not 0 < count <= min(most, stop - expected):
            raise TransportFailed(
                f"{pull.what}: received {frame.kind!r} with {count} records from block {frame.first_block}"
                f" on; expected blocks {expected} to {stop}, {most} at a time"
            )
        data = buffer[: count * pull.record_bytes]
        own = line.receive_records(frame, data, pull.check_time)
        yield Records(expected, data.reshape(count, pull.record_bytes), own)
        expected += count
        pull.check_time()
        if expected == stop:
            return
        frame = _next(pull, line)


def _connected(pull: Pull, host: str, port: int) -> socket.socket:
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
    raise TransportFailed(f"{problem}: {last}; is it open between the workers (those of handoff.listen)?")


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
