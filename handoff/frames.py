"""The record protocol over TCP: a puller sends a request, the saving rank answers with records.

A frame is a prefix of 16 bytes, a head and a body:

    PULL  head: PullRequest                     from the puller, one at a time
    RECS  head: digests; body: whole records    as soon as records are ready; any number of frames
    WAIT  empty                                 keepalive while no record is ready
    FAIL  head: an error's name and its text    ends the pull
    SHUT  head: a text                          the rank hangs up; never sealed

A puller begins with GREETING and a session from the rank's Handoff service (Connect). With TLS that call also
returns keys, and all bytes except the greeting and SHUT are sealed (security/sealing.py): the head with the
prefix as associated data, then the body in pieces. System calls time out five times a second, so that `look`
can stop a transfer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baton.errors import BatonError
from baton.handoff.records import Bytes, Digests
from baton.security.errors import NotAsSealed

if TYPE_CHECKING:  # plain text needs no cryptography
    from baton.security.sealing import Seal

GREETING = b"baton-kv"
SESSION_BYTES = 16
PULL, RECORDS, WAIT, FAIL, SHUT = b"PULL", b"RECS", b"WAIT", b"FAIL", b"SHUT"

FRAME_BYTES = 4 << 20  # maximum bytes of records in a frame, unless a single record is larger
MOST_RECORDS = 4096  # maximum records in a frame
WAIT_S = 2.0  # interval of keepalives
SILENT_S = 10.0  # after this long without a byte, the other end is presumed dead or stopped
SLOW_S = 60.0  # a puller may read nothing for this long, while it waits for another rank's records
_LOOK_S = 0.2  # interval of `look`: how soon a blocked pull notices a cancellation
_MAX_HEAD = 64 << 10
_PIECE_BYTES = 1 << 20  # pieces of a sealed body
_TAG_BYTES = 16
_PREFIX = struct.Struct("<4sIII")  # kind, bytes of the head (in plain text), first block, records
_PROBE_S, _PROBE_EVERY_S, _PROBES = 5, 2, 3  # TCP keepalive of an idle connection


class Broken(BatonError):
    """The connection is unusable and must be closed."""


@dataclass(frozen=True)
class Frame:
    """A frame without its body. For received records, the head has not been read yet either."""

    kind: bytes
    head: bytes = b""
    first_block: int = 0
    records: int = 0
    prefix: bytes = b""  # raw prefix of a received frame


def nothing() -> None:
    """Never stop a transfer: the default `look`."""


class Line:
    """A connection after the greeting. One thread uses it at a time; any thread may `cut` it."""

    def __init__(
        self, connection: socket.socket, send: Seal | None = None, receive: Seal | None = None
    ) -> None:
        """Take over a connected socket. send, receive: seals, if TLS is on."""
        tune(connection)
        self._socket = connection
        self._send_seal, self._receive_seal = send, receive
        self._heard = False  # received at least one authentic frame

    def peek(self) -> bool | None:
        """Return whether data is waiting; None if the other end has disconnected. Does not block."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) or None
        except BlockingIOError:
            return False
        except OSError:
            return None

    def wait(self, timeout_s: float) -> bool:
        """Wait for data, or for the connection's end. Return False after the timeout."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(timeout_s * 1e3))

    def send(
        self, frame: Frame, body: Bytes | None = None, look: Callable[[], None] = nothing, before: bytes = b""
    ) -> None:
        """Send `before`, then a frame. Raises Broken, and whatever `look` raises."""
        prefix = _PREFIX.pack(frame.kind, len(frame.head), frame.first_block, frame.records)
        rest = memoryview(b"") if body is None else body.reshape(-1).data
        if self._send_seal is None:
            self._write([memoryview(part) for part in (before, prefix, frame.head, rest)], look)
            return
        head = memoryview(bytearray(len(frame.head) + _TAG_BYTES))
        self._send_seal.seal(frame.head, head, prefix)
        parts = [memoryview(before), memoryview(prefix), head]
        with _scratch() as scratch:
            for at in range(0, len(rest), _PIECE_BYTES):
                piece = rest[at : at + _PIECE_BYTES]
                sealed = scratch[: len(piece) + _TAG_BYTES]
                self._send_seal.seal(piece, sealed)
                self._write([*parts, sealed], look)
                parts = []
        if parts:
            self._write(parts, look)

    def receive(self, look: Callable[[], None] = nothing, silent_s: float | None = None) -> Frame:
        """Return the next frame; after RECORDS call `receive_records`. Raises as `send` does."""
        silent_s = SILENT_S if silent_s is None else silent_s
        prefix = bytes(self._read_new(_PREFIX.size, look, silent_s))
        kind, size, first_block, records = _PREFIX.unpack(prefix)
        head = b""
        if kind == SHUT and size <= _MAX_HEAD:
            said = bytes(self._read_new(size, look, silent_s))
            raise Broken("it hung up" if self._heard and self._receive_seal else _words(said))
        fits = size == 8 * records <= 8 * MOST_RECORDS if kind == RECORDS else size <= _MAX_HEAD
        if kind not in (PULL, RECORDS, WAIT, FAIL) or not fits:
            raise Broken(f"received {prefix[:4]!r} and a head of {size} bytes, which is not a frame")
        if kind != RECORDS:
            head = self._read_head(prefix, size, look, silent_s)
        return Frame(kind, head, first_block, records, prefix)

    def receive_records(self, frame: Frame, into: Bytes, look: Callable[[], None] = nothing) -> Digests:
        """Fill `into`, and return the records' digests. Raises Broken, and whatever `look` raises."""
        whole, size = into.reshape(-1).data, 8 * frame.records
        if self._receive_seal is None:
            head = bytearray(size)
            self._read([memoryview(head), whole], look, SILENT_S)
            return np.frombuffer(head, "<u8")
        opened = self._read_head(frame.prefix, size, look, SILENT_S)
        with _scratch() as scratch:
            for at in range(0, len(whole), _PIECE_BYTES):
                piece = whole[at : at + _PIECE_BYTES]
                sealed = scratch[: len(piece) + _TAG_BYTES]
                self._read([sealed], look, SILENT_S)
                _opened(self._receive_seal, sealed, piece)
        return np.frombuffer(opened, "<u8")

    def cut(self) -> None:
        """Shut the connection down, waking threads blocked at either end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read_head(self, prefix: bytes, size: int, look: Callable[[], None], silent_s: float) -> bytes:
        if self._receive_seal is None:
            head = self._read_new(size, look, silent_s)
        else:
            head = bytearray(size)
            sealed = self._read_new(size + _TAG_BYTES, look, silent_s)
            _opened(self._receive_seal, sealed, memoryview(head), prefix)
        self._heard = True
        return bytes(head)

    def _read_new(self, size: int, look: Callable[[], None], silent_s: float) -> bytearray:
        made = bytearray(size)
        self._read([memoryview(made)], look, silent_s)
        return made

    def _read(self, into: list[memoryview], look: Callable[[], None], silent_s: float) -> None:
        into, heard_s = _without(into, 0), time.monotonic()
        while into:
            came = self._tried(lambda: self._socket.recvmsg_into(into, 0, socket.MSG_WAITALL)[0])  # noqa: B023
            if came == 0:
                raise Broken("it hung up")
            if came:
                into, heard_s = _without(into, came), time.monotonic()
            elif time.monotonic() - heard_s > silent_s:
                raise Broken(f"nothing came for {silent_s:g} s")
            if into:
                look()

    def _write(self, parts: list[memoryview], look: Callable[[], None]) -> None:
        parts, moved_s = _without(parts, 0), time.monotonic()
        while parts:
            sent = self._tried(lambda: self._socket.sendmsg(parts))  # noqa: B023
            if sent:
                moved_s = time.monotonic()
                parts = _without(parts, sent)
            elif time.monotonic() - moved_s > SLOW_S:
                raise Broken(f"it took nothing for {SLOW_S:g} s")
            if parts:
                look()

    @staticmethod
    def _tried(act: Callable[[], int]) -> int | None:
        """Return how many bytes moved; None on a timeout."""
        try:
            return act()
        except BlockingIOError:
            return None
        except OSError as error:
            raise Broken(error.strerror or str(error)) from None


_scratches: list[memoryview] = []  # unused


@contextlib.contextmanager
def _scratch() -> Iterator[memoryview]:
    """Lend memory for a sealed piece. The pool grows to the peak number of concurrent transfers."""
    try:
        lent = _scratches.pop()
    except IndexError:
        lent = memoryview(bytearray(_PIECE_BYTES + _TAG_BYTES))
    try:
        yield lent
    finally:
        _scratches.append(lent)


def _opened(seal: Seal, sealed: memoryview | bytearray, into: memoryview, beside: bytes = b"") -> None:
    try:
        seal.open(sealed, into, beside)
    except NotAsSealed as error:
        raise Broken(str(error)) from None


def tune(connection: socket.socket) -> None:
    """Disable Nagle, limit blocking calls to _LOOK_S, and detect hosts that vanish."""
    connection.settimeout(None)
    limit = struct.pack("@ll", 0, int(_LOOK_S * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _PROBE_S),
        (socket.TCP_KEEPINTVL, _PROBE_EVERY_S),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def shut(text: str) -> bytes:
    """Return the frame that refuses a connection."""
    head = text.encode()
    return _PREFIX.pack(SHUT, len(head), 0, 0) + head


def _words(said: bytes) -> str:
    """Return text from an untrusted peer as one short printable line."""
    text = said[:300].decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _without(parts: list[memoryview], moved: int) -> list[memoryview]:
    for number, part in enumerate(parts):
        if moved < len(part):
            return [part[moved:], *parts[number + 1 :]]
        moved -= len(part)
    return []
