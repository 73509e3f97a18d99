"""A TCP proxy in front of one server that simulates a network with delays and drops.

Dropped bytes are delivered later, as on a network that recovers before TCP gives up; no connection is closed.
New connections are accepted but stay silent until the network recovers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

_PIECE = 1 << 16  # bytes read at once


class Proxy:
    """A proxy from loopback's `port` to `target`, which may change."""

    def __init__(self, host: str = "127.0.0.1", target: int = 0) -> None:
        self.host = host
        self.target = target  # the target's port, for new connections; 0: not set yet
        self.port = 0
        self.delay_s = 0.0  # one way
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket | None = None) -> None:
        """Serve on a free port, or on `listener`, which may belong to another network namespace."""
        listener = listener or socket.create_server(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._serve, sock=listener)
        self.port = self._server.sockets[0].getsockname()[1]

    def drop(self) -> None:
        """Block both directions until `mend`."""
        self._open.clear()

    def mend(self) -> None:
        self.delay_s = 0.0
        self._open.set()

    async def close(self) -> None:
        self.mend()
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not in a task")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with contextlib.closing(writer), contextlib.suppress(OSError):
            await self._open.wait()
            there, back = await asyncio.open_connection(self.host, self.target)
            with contextlib.closing(back):
                ways = [
                    asyncio.create_task(self._pass(reader, back)),
                    asyncio.create_task(self._pass(there, writer)),
                ]
                try:  # until one end closes
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward data in order. Each piece is delayed; delays do not accumulate."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

        async def read() -> None:
            while piece := await reader.read(_PIECE):
                await pieces.put((loop.time() + self.delay_s, piece))
            await pieces.put((loop.time() + self.delay_s, b""))

        reading = asyncio.create_task(read())
        try:
            while True:
                due, piece = await pieces.get()
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                await self._open.wait()
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
