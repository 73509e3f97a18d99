"""A small application behind the router's HTTP connections, for tests with raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from baton.services.router.http.connections import Connections
from baton.services.router.http.limits import HttpLimits
from harness.fake_worker import until
from harness.support import CALL_S

SLOW_S = 0.4
KEEP_ALIVE_S = 1.0
MAX_BODY = 256 << 10
LARGE = 1 << 20  # more than the buffers of kernel and client


@dataclass
class Seen:
    """The requests that the application received."""

    bodies: list[int] = field(default_factory=list)  # sizes in bytes
    left: int = 0  # clients that disconnected before the end of their response
    sent: int = 0  # response bytes
    refused: list[str] = field(default_factory=list)  # reasons
    headers: list[list[bytes]] = field(default_factory=list)  # header names of completed requests
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # responses of /gate wait for it


@dataclass
class Server:
    port: int
    seen: Seen
    uvicorn: uvicorn.Server
    protocol: Connections
    clients: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def open_connections(self) -> int:
        return len(self.uvicorn.server_state.connections)

    @property
    def held(self) -> int:
        """Bytes of request bodies that count against the limit."""
        return self.protocol.held


@contextlib.asynccontextmanager
async def serving(seen: Seen, max_connections: int = 10, slow_s: float = SLOW_S) -> AsyncIterator[Server]:
    """Answer GET at once and POST after its body; /endless sends until the client disconnects."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                seen.left += 1
                return
            size += len(message["body"])
            more = message["more_body"]
        seen.bodies.append(size)
        status = 401 if scope["path"] == "/early" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        if scope["path"] == "/wait":
            assert (await receive())["type"] == "http.disconnect"
            seen.left += 1
            return
        while scope["path"] == "/endless" and not gone(receive):
            await send({"type": "http.response.body", "body": bytes(8192), "more_body": True})
            seen.sent += 8192
            await asyncio.sleep(0)
        if scope["path"] == "/gate":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await seen.gate.wait()
        last = bytes(LARGE) if scope["path"] == "/large" else b"ok"
        await send({"type": "http.response.body", "body": last, "more_body": False})
        seen.sent += len(last)
        seen.headers.append([name for name, _ in scope["headers"]])

    def gone(receive: Any) -> bool:
        if receive.__self__.disconnected:
            seen.left += 1
        return bool(receive.__self__.disconnected)

    limits = HttpLimits(MAX_BODY, max_connections, slow_s, KEEP_ALIVE_S)
    protocol: Any = Connections(limits, seen.refused.append)  # uvicorn asks for a class, and only calls it
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.create_task(server._serve([sock]))
        await until(lambda: server.started, "uvicorn serves")
        one = Server(sock.getsockname()[1], seen, server, protocol)
        try:
            yield one
        finally:
            server.should_exit = server.force_exit = True
            await task
            for writer in one.clients:
                writer.close()


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    server.clients.append(writer)
    return reader, writer


async def answer_to(server: Server, wire: bytes) -> bytes:
    """Send bytes on a new connection; return everything received until the server closes it."""
    reader, writer = await connect(server)
    writer.write(wire)
    try:
        return await asyncio.wait_for(reader.read(), CALL_S)
    finally:
        writer.close()


async def one_answer(reader: asyncio.StreamReader) -> bytes:
    """Read one of the application's answers, on a connection that stays open."""
    return await asyncio.wait_for(reader.readuntil(b"ok\r\n0\r\n\r\n"), CALL_S)
