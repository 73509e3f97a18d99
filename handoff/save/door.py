"""The server of the port for records: it admits pullers that have a session and answers their requests.

Each connection has a thread. The numbers of connections, of connections without a greeting and of running
requests are bounded, and so is the time for each.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from baton import addresses
from baton.handoff.frames import GREETING, SESSION_BYTES, Broken, Line, shut
from baton.keeping import keep_thread
from baton.protos.handoff_pb2 import ConnectReply

logger = logging.getLogger(__name__)

CONNECTIONS = 256  # beyond this, the connection that was idle for longest is closed
STRANGERS = 32  # maximum connections without a greeting
GREETING_S = 5.0
IDLE_S = 900.0  # a connection without a pull for this long is closed
CALLS = 64  # maximum concurrent requests
_SESSIONS = 1024  # maximum unused sessions
_SESSION_S = 30.0  # time to use a session
_CUT_S = 2.0  # time for a request to notice that its connection was cut
_DEAF_S = 1.0  # pause after a failed accept


class _Refused(Exception):
    """The reason for hanging up, which is sent to the other end."""


class Door:
    """A rank's listening socket and its connections. Thread-safe."""

    def __init__(self, host: str, port: int, answer: Callable[[Line], bool], *, sealed: bool) -> None:
        """Listen; port 0 takes a free one. Raises OSError.

        answer: called for each request, may block; returns whether the connection can be used again. sealed:
        encrypt connections.
        """
        self._answer = answer
        self._sealed = sealed
        # as gRPC does, bind both families for either wildcard: pullers use one address for calls and records
        both = addresses.is_wildcard(host) and socket.has_dualstack_ipv6()
        self._listener = addresses.listen("::" if both else host, port)
        self._listener.settimeout(None)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()  # guards everything below
        self._quiet = threading.Condition(self._lock)
        self._sessions: OrderedDict[bytes, tuple[float, ConnectReply]] = OrderedDict()  # oldest first
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()  # oldest first
        self._idle: OrderedDict[socket.socket, Line] = OrderedDict()  # longest idle first
        self._running: dict[socket.socket, Line] = {}  # being answered
        self._closed = False
        keep_thread(self._accept, "baton-kv-door").start()

    def invite(self) -> ConnectReply:
        """Return a session, with which a puller can connect once."""
        reply = ConnectReply(port=self.port, session=secrets.token_bytes(SESSION_BYTES))
        if self._sealed:
            from baton.security.sealing import new_key

            reply.here_key, reply.there_key = new_key(), new_key()
        with self._lock:
            while len(self._sessions) >= _SESSIONS:
                self._sessions.popitem(last=False)
            self._sessions[reply.session] = time.monotonic() + _SESSION_S, reply
        return reply

    def close(self, grace_s: float) -> None:
        """Stop; running requests have `grace_s` to end. Idempotent."""
        with self._lock:
            self._closed = True
            unused = [*self._strangers, *self._idle]
        for connection in (self._listener, *unused):
            _wake(connection)
        self._listener.close()
        with self._lock:
            self._quiet.wait_for(lambda: not self._running, grace_s)
            for line in self._running.values():
                line.cut()
            self._quiet.wait_for(lambda: not self._running, _CUT_S)

    # ---- the door's thread

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:
                continue
            except OSError as error:  # out of descriptors or memory, or closed
                if not self._closed:
                    logger.warning("a connection for KV cannot be accepted: %s", error.strerror)
                    time.sleep(_DEAF_S)
                continue
            if not self._let_in(connection):
                _say(connection, f"{CONNECTIONS} connections are in use: try again")
                connection.close()
                continue
            serving = threading.Thread(
                target=self._serve, args=(connection,), name="baton-kv-pull", daemon=True
            )
            try:
                serving.start()
            except RuntimeError:  # no more threads
                logger.warning("a connection for KV is refused: no thread can be started")
                with self._lock:
                    self._strangers.pop(connection, None)
                _say(connection, "no thread can be started for it: try again")
                connection.close()
                time.sleep(_DEAF_S)

    def _let_in(self, connection: socket.socket) -> bool:
        """Register a new connection, after closing another if necessary. Return False if there is no room."""
        with self._lock:
            if (
                len(self._strangers) >= STRANGERS
            ):  # pullers greet within milliseconds, so the oldest is not one
                oldest, _ = self._strangers.popitem(last=False)
                _say(oldest, f"{STRANGERS} newer connections have not sent a greeting either")
                _wake(oldest)
            if len(self._strangers) + len(self._idle) + len(self._running) >= CONNECTIONS:
                if not self._idle:
                    return False
                _wake(self._idle.popitem(last=False)[0])
            self._strangers[connection] = None
            return True

    # ---- a connection's thread

    def _serve(self, connection: socket.socket) -> None:
        try:
            line = self._greeted(connection)
            while self._next_request(connection, line) and self._answer(line):
                self._end_request(connection)
        except _Refused as refused:
            _say(connection, str(refused))
        except Broken as error:
            logger.debug("a connection for KV ended: %s", error)
        except Exception:
            logger.exception("a pull failed unexpectedly")
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._idle.pop(connection, None)
            self._end_request(connection)
            connection.close()

    def _greeted(self, connection: socket.socket) -> Line:
        ends_s, greeting = time.monotonic() + GREETING_S, b""
        while (wanted := len(GREETING) + SESSION_BYTES - len(greeting)) > 0:
            connection.settimeout(max(0.001, ends_s - time.monotonic()))
            try:
                came = connection.recv(wanted)
            except TimeoutError:
                raise _Refused(f"no greeting within {GREETING_S:g} s") from None
            except OSError as error:
                raise Broken(error.strerror or str(error)) from None
            if not came:
                raise Broken("it hung up")
            greeting += came
            if not greeting.startswith(GREETING[: len(greeting)]):
                raise _Refused("this port serves KV to workers that have a session of the Handoff service")
        with self._lock:
            until_s, invited = self._sessions.pop(greeting[len(GREETING) :], (0.0, None))
        if invited is None or until_s < time.monotonic():
            raise _Refused("the session has expired, or is not this rank's")
        if not self._sealed:
            return Line(connection)
        from baton.security.sealing import Seal

        return Line(connection, Seal(invited.here_key), Seal(invited.there_key))

    def _next_request(self, connection: socket.socket, line: Line) -> bool:
        """Wait for a request; return False if the connection has ended. Raises _Refused."""
        with self._lock:
            self._strangers.pop(connection, None)
            if self._closed:
                return False
            self._idle[connection] = line
        came = line.wait(IDLE_S)
        with self._lock:
            if self._idle.pop(connection, None) is None:  # closed to make room
                return False
            if not came:
                raise _Refused(f"no pull for {IDLE_S:g} s")
            if line.peek() is None:
                return False
            if len(self._running) >= CALLS:
                raise _Refused(f"{CALLS} pulls are running already: try again")
            self._running[connection] = line
            return True

    def _end_request(self, connection: socket.socket) -> None:
        with self._lock:
            self._running.pop(connection, None)
            if not self._running:
                self._quiet.notify_all()


def _say(connection: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(shut(text))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(4096)  # unread bytes would turn the close into a reset


def _wake(connection: socket.socket) -> None:
    """Wake the thread that waits on this connection; the thread then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
