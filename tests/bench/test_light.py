import asyncio
import contextlib
from contextlib import asynccontextmanager

import pytest

from bench import light
from bench.light import Client

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n%s\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Server:
    def __init__(self, answer, hang_up):
        self._answer, self._hang_up = answer, hang_up
        self.connections = []

    async def serve(self, reader, writer):
        self.connections.append(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]))
                writer.write(self._answer)
                await writer.drain()
                if self._hang_up:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has disconnected
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def ended(self):
        """Wait until all connections so far have ended."""
        await asyncio.gather(*filter(None, self.connections))


@asynccontextmanager
async def serving(answer, hang_up):
    one = Server(answer, hang_up)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    client = Client(server.sockets[0].getsockname()[1])
    try:
        yield one, client
    finally:
        await client.close()
        server.close()
        await one.ended()


@pytest.mark.parametrize(
    ("answer", "hang_up", "idle_s", "connections"),
    [
        pytest.param(WHOLE, False, 1.0, 1, id="whole"),
        pytest.param(STREAM % b"", False, 1.0, 1, id="stream"),
        pytest.param(STREAM % b"Connection: close\r\n", False, 1.0, 2, id="its end is announced"),
        pytest.param(WHOLE, True, 1.0, 2, id="the server has closed it"),
        pytest.param(WHOLE, False, 0.0, 2, id="the server may be about to close it"),
    ],
)
async def test_a_connection_is_reused_if_it_can_be(answer, hang_up, idle_s, connections, monkeypatch):
    monkeypatch.setattr(light, "IDLE_S", idle_s)
    async with serving(answer, hang_up) as (server, client):
        for _ in range(2):
            reply = await client.post("/", {})
            assert (reply.status, reply.whole) == (200, True)
            if hang_up:
                await server.ended()
                await asyncio.sleep(0.05)  # the client then sees the end
        assert len(server.connections) == connections
