"""A router process accepts connections for a second one, which never runs here and has its own port."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest
import uvicorn

from baton.addresses import listen
from baton.services.router.group import Group, Seat
from baton.services.router.http import server as module
from baton.services.router.http.connections import Connections
from baton.services.router.http.limits import HttpLimits
from baton.services.router.http.server import LOOK_S, LOOKS_WHEN_FULL, Server
from harness.fake_worker import until
from harness.support import CALL_S

ROOM = 3  # connections
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


@dataclass
class Process:
    server: Server
    port: int
    other_port: int  # port of the process that does not run
    clients: list = field(default_factory=list)

    def client(self, port):
        self.clients.append(Client(port))
        return self.clients[-1]

    @property
    def connections(self):
        return len(self.server.server_state.connections)


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
async def process():
    limits = HttpLimits(max_body=1024, max_connections=ROOM, slow_client_s=CALL_S, keep_alive_s=CALL_S)
    protocol = Connections(limits, lambda _: None)
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, ws="none")
    with (
        contextlib.closing(listen("127.0.0.1", 0)) as own,
        contextlib.closing(listen("127.0.0.1", 0)) as other,
    ):
        server = Server(config, Seat(Group([own, other]), 0), 0.0, lambda: None)
        one = Process(server, own.getsockname()[1], other.getsockname()[1])
        task = asyncio.create_task(one.server._serve([own]))
        await until(lambda: one.server.started, "it serves")
        yield one
        for client in one.clients:
            await client.close()
        one.server.should_exit = one.server.force_exit = True
        await task


class Client:
    """A connection that stays open, with a request and the task that reads the response."""

    def __init__(self, port):
        self.writer = None
        self.status = asyncio.create_task(self._ask(port))

    async def _ask(self, port):
        reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.writer.write(POST)
        return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), CALL_S))[:12]

    async def close(self):
        self.status.cancel()
        await asyncio.wait([self.status])
        if self.writer is not None:
            self.writer.close()


async def test_a_process_accepts_only_as_many_connections_as_it_may_have(process, monkeypatch):
    """The other clients are answered as room becomes free."""
    monkeypatch.setattr(module, "LOOKS_WHEN_FULL", 1 << 30)
    waiting = [process.client(process.other_port) for _ in range(3 * ROOM)]

    def answered():
        return [one for one in waiting if one.status.done()]

    while waiting:
        await until(lambda: len(answered()) >= ROOM, "as many are answered as fit")
        assert process.connections == ROOM
        for one in answered():
            assert await one.status == b"HTTP/1.1 200"
            await one.close()
            waiting.remove(one)


async def test_a_full_process_refuses_a_connection_that_no_other_process_accepts(process):
    """A client without an answer would wait as long as the other process is away."""
    idle = [process.client(process.port) for _ in range(ROOM)]
    assert {await one.status for one in idle} == {b"HTTP/1.1 200"}
    began = asyncio.get_running_loop().time()
    assert await process.client(process.other_port).status == b"HTTP/1.1 503"
    assert asyncio.get_running_loop().time() - began >= LOOK_S * (LOOKS_WHEN_FULL - 1)


def test_accepting_too_late_does_not_block():
    """Two processes may race to accept a connection; the slower one must not block its event loop."""
    with contextlib.closing(listen("127.0.0.1", 0)) as sock:
        sock.settimeout(5)  # so that a failing test ends
        group = Group([sock])
        with pytest.raises(BlockingIOError):
            group.sockets[0].accept()
