"""A minimal HTTP/1.1 client and its loads, cheap because it shares cores with the measured servers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from harness.stats import percentile

TIMEOUT_S = 60.0
IDLE_S = 1.0  # idle connections are not reused after this: servers close them after five seconds


@dataclass
class Timed:
    """The times of one answer; they are `time.perf_counter`'s."""

    asked: float
    arrivals: list[float] = field(default_factory=list)  # when each event with tokens arrived

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.arrivals)]


@dataclass
class Reply(Timed):
    """One response."""

    status: int = 0  # 0: the connection ended without a response
    headers: bytes = b""
    body: bytes = b""  # a stream's last event
    done: float = 0.0
    whole: bool = False  # complete and without an error

    @property
    def took(self) -> float:
        return self.done - self.asked


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    since: float = 0.0  # when it became idle

    def stale(self) -> bool:
        """Return whether the server has closed it or may be about to."""
        return self.reader.at_eof() or time.perf_counter() - self.since > IDLE_S


class Client:
    """A pool of connections to one loopback server, one per concurrent request."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: dict[str, Any]) -> Reply:
        """Send a request and return its reply.

        Raises OSError if the connection fails, TimeoutError after TIMEOUT_S.
        """
        connection = self._reusable() or await self._connect()
        reader, writer = connection.reader, connection.writer
        data = json.dumps(body).encode()
        reply = Reply(time.perf_counter())
        keep = False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                writer.write(
                    b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(data), data)
                )
                keep = await _read(reader, reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the reply has no status or is incomplete
        finally:
            reply.done = time.perf_counter()
            if keep:
                connection.since = reply.done
                self._idle.append(connection)
            else:
                writer.transport.abort()
        return reply

    async def close(self) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    def _reusable(self) -> _Connection | None:
        """Take the most recently used connection that is still open; discard closed ones."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.stale():
                return connection
            connection.writer.transport.abort()
        return None

    async def _connect(self) -> _Connection:
        return _Connection(*await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22))


async def _read(reader: asyncio.StreamReader, reply: Reply) -> bool:
    """Read a response into `reply`. Return whether the connection can be reused."""
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
    await reader.readexactly(2)
    return b"connection: close" not in head


Make = Callable[[], dict[str, Any]]


def greedy(model: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Return a request for a streamed greedy answer of exactly `max_tokens`. more: further fields."""
    own = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return {"model": model, "max_tokens": max_tokens, **own, **more}


def body(
    draw: random.Random,
    prompt_tokens: int,
    answer_tokens: int,
    *,
    model: str,
    vocabulary: tuple[int, int] = (100, 4_000),
) -> dict[str, Any]:
    """Return a request for a streamed greedy answer to a random prompt."""
    prompt = [draw.randrange(*vocabulary) for _ in range(prompt_tokens)]
    return greedy(model, answer_tokens, prompt=prompt)


async def closed(client: Client, make: Make, streams: int, seconds: float) -> list[Reply]:
    """Run streams that send their next request as soon as the last is answered."""
    until = time.perf_counter() + seconds
    replies: list[Reply] = []

    async def loop() -> None:
        while time.perf_counter() < until:
            replies.append(await client.post("/v1/completions", make()))

    await asyncio.gather(*(loop() for _ in range(streams)))
    return replies


async def opened(
    client: Client, make: Make, per_s: float, seconds: float, draw: random.Random
) -> list[Reply]:
    """Send requests at random times and a fixed mean rate, whatever the server does."""
    replies: list[Reply] = []

    async def ask() -> None:
        try:
            replies.append(await client.post("/v1/completions", make()))
        except OSError:  # includes TimeoutError
            replies.append(Reply(time.perf_counter()))

    tasks: set[asyncio.Task[None]] = set()
    at, end = time.perf_counter(), time.perf_counter() + seconds
    while (at := at + draw.expovariate(per_s)) < end:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.add(task := asyncio.create_task(ask()))
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return replies


def ttfts(replies: list[Reply]) -> list[float]:
    """Return the times to first token in ms of the replies that have one."""
    return [1e3 * one.ttft for one in replies if one.arrivals]


def latencies(replies: list[Reply]) -> dict[str, float]:
    """Return the number of answers, and percentiles of their times to first token and gaps between tokens."""
    gaps = [1e3 * gap for one in replies for gap in one.gaps]
    found = {
        f"{name}_p{100 * share:.0f}_ms": round(percentile(values, share), 2)
        for name, values in (("ttft", ttfts(replies)), ("itl", gaps))
        for share in (0.5, 0.9, 0.99)
    }
    answers = sum(bool(one.arrivals) for one in replies)
    return {"answers": answers, **found, "itl_max_ms": round(max(gaps, default=0.0), 2)}
