"""The benches' HTTP client reuses connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bench import light
from bench.light import Client

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n%s\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Server:
    """Answers every request with the same bytes and counts connections."""

    def __init__(self, answer: bytes, hang_up: Callable[[], bool]) -> None:
        self._answer, self._hang_up = answer, hang_up
        self.connections: list[asyncio.Task[None] | None] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]))
                writer.write(self._answer)
                await writer.drain()
                if self._hang_up():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has disconnected
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def ended(self) -> None:
        """Wait until all connections so far have ended."""
        await asyncio.gather(*filter(None, self.connections))


@asynccontextmanager
async def serving(
    answer: bytes, hang_up: Callable[[], bool] = lambda: False
) -> AsyncIterator[tuple[Server, Client]]:
    one = Server(answer, hang_up)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    client = Client(server.sockets[0].getsockname()[1])
    try:
        yield one, client
    finally:
        await client.close()
        server.close()
        await one.ended()


async def ask_twice(client: Client) -> None:
    for _ in range(2):
        reply = await client.post("/", {})
        assert (reply.status, reply.whole) == (200, True)


@pytest.mark.parametrize("answer", [WHOLE, STREAM % b""], ids=["whole", "stream"])
async def test_a_connection_is_reused(answer: bytes) -> None:
    async with serving(answer) as (server, client):
        await ask_twice(client)
        assert len(server.connections) == 1


async def test_a_connection_that_the_server_closed_is_not_reused() -> None:
    async with serving(WHOLE, hang_up=lambda: True) as (server, client):
        for _ in range(2):
            assert (await client.post("/", {})).status == 200
            await server.ended()
            await asyncio.sleep(0.05)  # the client then sees the end
        assert len(server.connections) == 2


async def test_a_connection_that_the_server_is_about_to_close_is_not_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(light, "IDLE_S", 0.0)
    async with serving(WHOLE) as (server, client):
        await ask_twice(client)
        assert len(server.connections) == 2


async def test_a_stream_that_announces_the_end_of_its_connection() -> None:
    async with serving(STREAM % b"Connection: close\r\n") as (server, client):
        await ask_twice(client)
        assert len(server.connections) == 2
