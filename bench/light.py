"""A client that costs little, as it shares two cores with what it measures: HTTP/1.1 by hand."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 60.0


@dataclass
class Reply:
    """One answer. Times in seconds, `time.perf_counter`."""

    asked: float
    status: int = 0  # 0: the connection ended without one
    headers: bytes = b""
    body: bytes = b""  # of an answer in one piece, or a stream's last event
    arrivals: list[float] = field(default_factory=list)  # one an event that carries tokens
    done: float = 0.0
    whole: bool = False  # it ended as it should

    @property
    def took(self) -> float:
        return self.done - self.asked

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Client:
    """Connections to one server, reused; as many as there are requests at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: dict[str, Any], *, leave_after: int | None = None) -> Reply:
        """Send and read to the end; `leave_after` so many events, or at once (0), the client goes away.

        Raises OSError when there is no connection to be had, TimeoutError.
        """
        reader, writer = self._idle.pop() if self._idle else await self._connect()
        data = json.dumps(body).encode()
        reply = Reply(time.perf_counter())
        keep = False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                writer.write(
                    b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(data), data)
                )
                if leave_after != 0:
                    keep = await _read(reader, reply, leave_after)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a reply without a status, or not whole
        finally:
            reply.done = time.perf_counter()
            if keep:
                self._idle.append((reader, writer))
            else:
                writer.transport.abort()
        return reply

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)


async def _read(reader: asyncio.StreamReader, reply: Reply, leave_after: int | None) -> bool:
    """Whether the connection can be used again."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    reply.status, reply.headers = int(head[9:12]), head
    if b"content-length: " in head:
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        reply.body = await reader.readexactly(length)
        reply.whole = True
        return b"connection: close" not in head
    while size := int(await reader.readuntil(b"\r\n"), 16):
        piece = (await reader.readexactly(size + 2))[:-2]
        if b'"token_ids":[' in piece:
            reply.arrivals.append(time.perf_counter())
        elif b"[DONE]" in piece:
            reply.whole = b'"error"' not in reply.body
        if b"[DONE]" not in piece[:20]:
            reply.body = piece
        if leave_after is not None and len(reply.arrivals) >= leave_after:
            return False
    await reader.readexactly(2)
    return True
