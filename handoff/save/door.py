"""The server of the port for records: it admits pullers that have a session and dispatches their requests.

One thread waits for connections, greetings, and requests on idle connections. A request has a thread until it
is answered. Connections, connections without a greeting, threads, and the time for each are bounded.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton import addresses
from baton.handoff.frames import GREETING, SESSION_BYTES, Broken, Line, shut
from baton.keeping import keep_thread
from baton.protos.handoff_pb2 import ConnectReply

logger = logging.getLogger(__name__)

CONNECTIONS = 256  # beyond this, the longest idle one is closed
STRANGERS = 32  # maximum connections without a greeting
GREETING_S = 5.0
IDLE_S = 900.0  # a connection without a pull for this long is closed
CALLS = 64  # maximum concurrent requests, each with a thread
_SESSIONS = 1024  # maximum unused sessions
_SESSION_S = 30.0  # time to use a session
_CUT_S = 2.0  # time for a request to notice that its connection was cut
_DEAF_S = 1.0  # pause after a failed accept


@dataclass(eq=False)
class _Stranger:
    """A connection without a greeting."""

    socket: socket.socket
    ends_s: float  # time.monotonic
    greeting: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Guest:
    """A connection after its greeting."""

    socket: socket.socket
    line: Line
    ends_s: float = 0.0  # time.monotonic, while idle


class Door:
    """A rank's listening socket and its connections. Thread-safe."""

    def __init__(self, host: str, port: int, answer: Callable[[Line], bool], *, sealed: bool) -> None:
        """Listen; port 0 takes a free one. Raises OSError.

        answer: called for each request, may block; returns whether the connection can be used again. sealed:
        encrypt connections.
        """
        self._answer = answer
        self._sealed = sealed
        # as gRPC does, bind both families for either wildcard: pullers use the same address for both
        both = addresses.is_wildcard(host) and socket.has_dualstack_ipv6()
        self._listener = addresses.listen("::" if both else host, port)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._deaf_until = 0.0
        self._listening = False
        # both ordered by end, soonest first
        self._strangers: OrderedDict[socket.socket, _Stranger] = OrderedDict()
        self._idle: OrderedDict[socket.socket, _Guest] = OrderedDict()
        self._sessions: OrderedDict[bytes, tuple[float, ConnectReply]] = OrderedDict()  # oldest first
        self._lock = threading.Lock()  # guards everything below
        self._quiet = threading.Condition(self._lock)
        self._answered: deque[_Guest] = deque()
        self._running: dict[_Guest, None] = {}  # being answered
        self._closed = False
        self._thread = keep_thread(self._watch, "baton-kv-door")
        self._thread.start()

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
        self._rouse()
        self._thread.join(5)
        with self._lock:
            self._quiet.wait_for(lambda: not self._running, grace_s)
            running = list(self._running)
        for guest in running:
            guest.line.cut()
        with self._lock:
            self._quiet.wait_for(lambda: not self._running, _CUT_S)

    # ---- the door's thread

    def _watch(self) -> None:
        while not self._closed:
            self._listen()
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                elif key.fileobj is self._listener:
                    self._let_in()
                else:
                    self._hear(key.data)
            self._keep_answered()
            self._end_late()
        here: list[_Stranger | _Guest] = [*self._strangers.values(), *self._idle.values(), *self._answered]
        for guest in here:
            self._drop(guest)
        for one in (self._listener, self._woken, self._wake):
            one.close()
        self._selector.close()

    def _listen(self) -> None:
        if not self._listening and time.monotonic() >= self._deaf_until:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listening = True

    def _wait_s(self) -> float | None:
        firsts = [one.ends_s for one in itertools.islice(self._strangers.values(), 1)]
        firsts += [one.ends_s for one in itertools.islice(self._idle.values(), 1)]
        if not self._listening:
            firsts.append(self._deaf_until)
        return max(0.0, min(firsts) - time.monotonic()) if firsts else None

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        # out of descriptors or memory: pause, or the waiting connection would wake this thread again at once
        except OSError as error:
            logger.warning("a connection for KV cannot be accepted: %s", error.strerror)
            self._selector.unregister(self._listener)
            self._listening, self._deaf_until = False, time.monotonic() + _DEAF_S
            return
        connection.setblocking(False)
        stranger = _Stranger(connection, time.monotonic() + GREETING_S)
        if len(self._strangers) >= STRANGERS:  # pullers greet within milliseconds, so the oldest is not one
            oldest = next(iter(self._strangers.values()))
            self._refuse(oldest, f"{STRANGERS} newer connections have not sent a greeting either")
        if self._has_room():
            self._strangers[connection] = stranger
            self._selector.register(connection, selectors.EVENT_READ, stranger)
        else:
            self._refuse(stranger, f"{CONNECTIONS} connections are in use: try again")

    def _has_room(self) -> bool:
        """Return whether another connection fits, after closing an idle one if necessary."""
        if len(self._strangers) + len(self._idle) + len(self._running) < CONNECTIONS:
            return True
        if self._idle:
            self._drop(next(iter(self._idle.values())))
            return True
        return False

    def _hear(self, guest: _Stranger | _Guest) -> None:
        try:
            if isinstance(guest, _Stranger):
                self._greet(guest)
            else:
                self._call(guest)
        except Exception:  # drop the connection, so that a bug does not meet the same bytes again
            self._drop(guest)
            raise

    def _greet(self, stranger: _Stranger) -> None:
        """Read more of a greeting; admit the connection when it is complete."""
        wanted = len(GREETING) + SESSION_BYTES - len(stranger.greeting)
        try:
            came = stranger.socket.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        stranger.greeting += came
        if not came:
            self._drop(stranger)
        elif not stranger.greeting.startswith(GREETING[: len(stranger.greeting)]):
            self._refuse(
                stranger, "this port serves KV to workers that have a session of the Handoff service"
            )
        elif len(came) == wanted:
            self._admit(stranger, bytes(stranger.greeting[len(GREETING) :]))

    def _admit(self, stranger: _Stranger, session: bytes) -> None:
        with self._lock:
            ends_s, invited = self._sessions.pop(session, (0.0, None))
        if invited is None or ends_s < time.monotonic():
            self._refuse(stranger, "the session has expired, or is not this rank's")
            return
        if self._sealed:
            from baton.security.sealing import Seal

            line = Line(stranger.socket, Seal(invited.here_key), Seal(invited.there_key))
        else:
            line = Line(stranger.socket)
        del self._strangers[stranger.socket]
        guest = _Guest(stranger.socket, line)
        self._selector.modify(guest.socket, selectors.EVENT_READ, guest)
        self._rest(guest)

    def _rest(self, guest: _Guest) -> None:
        """Wait for the connection's next request."""
        guest.ends_s = time.monotonic() + IDLE_S
        self._idle[guest.socket] = guest

    def _call(self, guest: _Guest) -> None:
        """Dispatch a request, or drop the connection if the puller has hung up."""
        if guest.line.peek() is None:
            self._drop(guest)
            return
        with self._lock:
            full = len(self._running) >= CALLS
            if not full:
                del self._idle[guest.socket]
                self._selector.unregister(guest.socket)
                self._running[guest] = None
                threading.Thread(target=self._work, args=(guest,), name="baton-kv-pull", daemon=True).start()
        if full:
            self._refuse(guest, f"{CALLS} pulls are running already: try again")

    def _keep_answered(self) -> None:
        while self._answered:
            guest = self._answered.popleft()
            self._selector.register(guest.socket, selectors.EVENT_READ, guest)
            self._rest(guest)

    def _end_late(self) -> None:
        now = time.monotonic()
        while self._strangers and (stranger := next(iter(self._strangers.values()))).ends_s <= now:
            self._refuse(stranger, f"no greeting within {GREETING_S:g} s")
        while self._idle and (guest := next(iter(self._idle.values()))).ends_s <= now:
            self._refuse(guest, f"no pull for {IDLE_S:g} s")

    def _refuse(self, guest: _Stranger | _Guest, text: str) -> None:
        """Hang up with a reason."""
        with contextlib.suppress(OSError):
            guest.socket.send(shut(text), socket.MSG_DONTWAIT)
            guest.socket.shutdown(socket.SHUT_WR)
            guest.socket.recv(4096, socket.MSG_DONTWAIT)  # unread bytes would turn it into a reset
        self._drop(guest)

    def _drop(self, guest: _Stranger | _Guest) -> None:
        self._strangers.pop(guest.socket, None)
        self._idle.pop(guest.socket, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.socket)
        guest.socket.close()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):  # full, so the thread is awake anyway; or closed
            self._wake.send(b"\0")

    # ---- the requests' threads

    def _work(self, guest: _Guest) -> None:
        again = False
        try:
            again = self._answer(guest.line)
        except Broken as error:
            logger.debug("a pull ended: %s", error)
        except Exception:
            logger.exception("a pull failed unexpectedly")
        finally:
            self._over(guest, again=again)

    def _over(self, guest: _Guest, *, again: bool) -> None:
        with self._lock:
            del self._running[guest]
            again = again and not self._closed
            if again:
                self._answered.append(guest)
            if not self._running:
                self._quiet.notify_all()
        if again:
            self._rouse()
        else:
            guest.socket.close()
