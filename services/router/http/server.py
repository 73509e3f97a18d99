"""The HTTP server of one of a router's processes: uvicorn's, on a port that it shares with the others.

The kernel gives each connection to one process, by its addresses. If that process does not accept it, because
it is dead, restarts, drains or is busy, another one accepts it at its second look: no client is refused or
reset, and it waits for 2 * LOOK_S at most. A process without room leaves it to the others for longer.

Leans on: uvicorn.Server (capture_signals, handle_exit, startup, shutdown, should_exit, server_state,
lifespan).
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
LOOKS = 2  # looks in a row that find a connection at another process's socket before it is accepted
# The same for a process at its limit of connections, which refuses requests on further ones: others may have
# room. But if one is dead and the rest are full, clients are refused, and health checks work.
LOOKS_WHEN_FULL = 20
AT_ONCE = 16  # most connections accepted from another process's socket at one look
LAST_S = 0.5  # time to take over connections that the kernel has accepted when a process ends


class Server(uvicorn.Server):
    """Serves until a signal. Then it accepts nothing, and lets streams end within `drain_s`."""

    def __init__(
        self, config: uvicorn.Config, seat: Seat, drain_s: float, end_all: Callable[[], None]
    ) -> None:
        """Serve in the place of `seat`; `end_all` ends the streams that are left after `drain_s` seconds."""
        super().__init__(config)
        self._seat = seat
        self._drain_s = drain_s
        self._end_all = end_all
        self._looking: asyncio.Task[None] | None = None
        self._told = False  # told to end by a signal, so that a second one hurries

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """React to signals. uvicorn's own would raise them again at the end: our status would not be 0."""
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
        """Start to accept connections."""
        await super().startup(sockets)
        if not self._seat.alone:
            self._looking = keep(self._look, "connections that other processes leave")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and wait for the streams."""
        if self._looking is not None:
            await stop(self._looking)
        if self._seat.alone or self._seat.group.ending:
            await self._accept_last()
        await super().shutdown(sockets)

    async def _look(self) -> None:
        """Accept forever the connections that others do not accept; run it as a task."""
        others = {sock.fileno(): sock for sock in self._seat.others}
        poll = select.poll()
        for descriptor in others:
            poll.register(descriptor, select.POLLIN)
        looks: dict[int, int] = {}  # descriptor -> looks in a row that found a connection
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
            except OSError:  # none is left, or the next look finds it
                return
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
            except OSError:  # the client has left
                connection.close()

    @property
    def _full(self) -> bool:
        """Whether a request on one more connection would be refused."""
        return len(self.server_state.connections) >= self._connections.limits.max_connections

    @property
    def _connections(self) -> Connections:
        return cast(Connections, self.config.http_protocol_class)  # declared as a class, but only called

    def _protocol(self) -> asyncio.Protocol:
        """Make a connection's protocol as uvicorn does."""
        return self._connections(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def _accept_last(self) -> None:
        """Accept the connections that wait, then refuse new ones, also for other holders of this socket."""
        sock = self._seat.sock
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        last = asyncio.get_running_loop().time() + LAST_S
        while poll.poll(0) and asyncio.get_running_loop().time() < last:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)  # the loop accepts one or more each time
        sock.shutdown(socket.SHUT_RDWR)
