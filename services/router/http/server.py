"""The HTTP server of one router process: uvicorn, on a port that the router's other processes share.

The kernel assigns each connection to one process. If that process does not accept it because it
is dead, restarting, draining or busy, another one does so within 2 * LOOK_S: no client is refused or reset.

Uses undocumented parts of uvicorn: uvicorn.Server (capture_signals, handle_exit, startup, shutdown,
should_exit, server_state, lifespan).
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import cast

import uvicorn

from baton import signals
from baton.keeping import keep
from baton.services.router.group import Seat
from baton.services.router.http.connections import Connections
from baton.tasks import stop

LOOK_S = 0.05
LOOKS = 2  # consecutive looks that must find a connection waiting at another process's socket
# LOOKS for a process at its connection limit, which would refuse the request: another process may have
# room. If one is dead and the others are full, clients still get a refusal, and health checks still work.
LOOKS_WHEN_FULL = 20
AT_ONCE = 16  # connections accepted from another process's socket per look
LAST_S = 0.5  # time to accept the connections that are already queued when a process ends


class Server(uvicorn.Server):
    """Serves until a signal, then stops accepting connections and gives streams `drain_s` seconds to end."""

    def __init__(
        self, config: uvicorn.Config, seat: Seat, drain_s: float, end_all: Callable[[], None]
    ) -> None:
        """Serve at the socket of `seat`; `end_all` ends the streams still running after `drain_s` seconds."""
        super().__init__(config)
        self._seat = seat
        self._drain_s = drain_s
        self._end_all = end_all
        self._looking: asyncio.Task[None] | None = None
        self._told = False  # a first signal has come, so a second one ends all streams

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals: uvicorn would raise them again at the end, so our exit status would not be 0."""
        loop = asyncio.get_running_loop()
        for number in signals.ending():
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to shut down; a second SIGINT or SIGTERM ends all streams at once."""
        del frame
        if not self.should_exit:
            asyncio.get_running_loop().call_later(self._drain_s, self._end_all)
        self.should_exit = True
        if sig in signals.HURRYING:
            self.force_exit, self._told = self._told, True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self._seat.alone:
            self._looking = keep(self._look, "connections that other processes leave")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._looking is not None:
            await stop(self._looking)
        if self._seat.alone or self._seat.group.ending:
            await self._accept_last()
        await super().shutdown(sockets)

    async def _look(self) -> None:
        others = {sock.fileno(): sock for sock in self._seat.others}
        poll = select.poll()
        for descriptor in others:
            poll.register(descriptor, select.POLLIN)
        looks: dict[int, int] = {}  # descriptor -> consecutive looks that found a connection
        while True:
            await asyncio.sleep(LOOK_S)
            found = [descriptor for descriptor, event in poll.poll(0) if event & select.POLLIN]
            looks = {descriptor: looks.get(descriptor, 0) + 1 for descriptor in found}
            for descriptor, count in looks.items():
                if count >= LOOKS:
                    await self._take(others[descriptor], though_full=count >= LOOKS_WHEN_FULL)

    async def _take(self, sock: socket.socket, *, though_full: bool) -> None:
        for _ in range(AT_ONCE):
            if self._full and not though_full:
                return
            try:
                connection, _ = sock.accept()
            except OSError:  # no connection is left; after any other error the next look tries again
                return
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
            except OSError:  # the client has left
                connection.close()

    @property
    def _full(self) -> bool:
        return len(self.server_state.connections) >= self._connections.limits.max_connections

    @property
    def _connections(self) -> Connections:
        return cast(Connections, self.config.http_protocol_class)  # declared as a class, but only called

    def _protocol(self) -> asyncio.Protocol:
        return self._connections(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def _accept_last(self) -> None:
        """Accept the queued connections, then shut the socket down in every process that holds it."""
        sock = self._seat.sock
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        last = asyncio.get_running_loop().time() + LAST_S
        while poll.poll(0) and asyncio.get_running_loop().time() < last:  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(0)  # the loop accepts one or more each time
        sock.shutdown(socket.SHUT_RDWR)
