"""Every byte that a client sends is counted, and no connection or byte is left behind."""

import asyncio
import contextlib
import random

import pytest

from baton.services.router.http import connections as module
from harness.doors import KEEP_ALIVE_S, MAX_BODY, SLOW_S, Seen, answer_to, connect, one_answer, serving
from harness.fake_worker import until
from harness.support import CALL_S

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
EARLY = b"POST /early HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
MOST = 16 << 20  # more than kernel buffers hold


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    monkeypatch.setattr(module, "LINGER_S", SLOW_S)
    monkeypatch.setattr(module, "LINGER_BYTES", 1 << 20)


async def sent_until_cut(server, head, piece):
    """Send a head and then pieces without end; return how many bytes were sent until the connection ended."""
    reader, writer = await connect(server)
    writer.write(head)
    sent = 0
    answer = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        while sent < MOST and not writer.is_closing():
            writer.write(piece)
            sent += len(piece)
            await asyncio.wait_for(writer.drain(), CALL_S)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await answer
    return sent


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (HEAD + CHUNKED + b"0\r\n", b"X: y\r\n" * 1000),
        (HEAD + CHUNKED + b"0\r\nX: ", b"y" * 10_000),
        (EARLY + CHUNKED + b"0\r\n", b"X: y\r\n" * 1000),
        (HEAD + CHUNKED + b"1;a=", b"b" * 10_000),
        (EARLY + CHUNKED, b"10000\r\n" + bytes(0x10000) + b"\r\n"),
        (GET, b"\r\n" * 5000),
        (b"", b"\r\n" * 5000),
        (b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n", GET * 500),
    ],
    ids=[
        *("trailers", "one trailer", "trailers after an answer", "a chunk's extension"),
        *("a body after an answer", "line breaks after an answer", "line breaks", "pipelined requests"),
    ],
)
async def test_no_input_is_endless(server, head, piece):
    assert await sent_until_cut(server, head, piece) < MOST
    await until(lambda: server.open_connections == 0, "all connections end")
    assert server.held == 0


async def test_trailers_do_not_join_the_headers(server):
    reader, writer = await connect(server)
    writer.write(HEAD + CHUNKED + b"1\r\nx\r\n0\r\nAuthorization: Bearer other\r\n\r\n")
    assert (await one_answer(reader)).startswith(b"HTTP/1.1 200")
    assert server.seen.headers == [[b"host", b"transfer-encoding"]]


@pytest.mark.parametrize("size", [1000, MAX_BODY])
async def test_a_body_after_an_early_answer_is_not_kept(server, size):
    """Clients wait for the answer, then send the body and go silent."""
    clients = [await connect(server) for _ in range(8)]
    for reader, writer in clients:
        writer.write(EARLY + b"Content-Length: %d\r\n\r\n" % size)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), CALL_S)).startswith(b"HTTP/1.1 401")
    for _, writer in clients:
        writer.write(bytes(size))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
    await until(lambda: server.held == 0, "nothing is held")
    await until(lambda: server.open_connections == 0, "the connections end")
    assert server.held == 0


async def test_a_short_body_after_an_early_answer_costs_no_connection(server):
    """Clients that send headers and body separately keep their connection when they are refused."""
    reader, writer = await connect(server)
    for _ in range(3):
        writer.write(EARLY + b"Content-Length: 1000\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), CALL_S)
        assert head.startswith(b"HTTP/1.1 401")
        assert b"close" not in head
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), CALL_S)
        writer.write(bytes(1000))


async def test_a_client_that_sends_on_still_reads_its_early_answer(monkeypatch):
    """A client that sends a large body before it reads would see a reset if it were cut at once."""
    monkeypatch.setattr(module, "LINGER_S", CALL_S)
    async with serving(Seen(), slow_s=CALL_S) as server:
        reader, writer = await connect(server)
        writer.write(EARLY + b"Content-Length: %d\r\n\r\n" % MAX_BODY)
        for _ in range(8):
            writer.write(bytes(MAX_BODY // 8))
            await asyncio.sleep(0.01)
        got = await asyncio.wait_for(reader.read(), CALL_S)
    assert got.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in got


@pytest.mark.parametrize("method", [b"GET", b"POST"])
@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.0"])
async def test_an_upgrade_is_ignored_and_the_next_request_is_served(server, upgrade, method):
    reader, writer = await connect(server)
    asked = method + b" / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: " + upgrade
    body = b"Content-Length: 2\r\n\r\n{}" if method == b"POST" else b"\r\n"
    writer.write(asked + b"\r\nHTTP2-Settings: AAMA\r\n" + body + GET)
    for _ in range(2):
        assert (await one_answer(reader)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"GET http://example.org/x?y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
        (b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200"),
        (HEAD + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", b"100"),
        (EARLY + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\n", b"401"),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\n", b"415"),
        (HEAD + b"Content-Encoding: identity\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx", b"200"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"501"),
    ],
)
async def test_unusual_requests_end_with_an_answer(server, wire, status):
    assert (await answer_to(server, wire)).split()[1] == status
    await until(lambda: server.open_connections == 0, "all connections end")
    assert server.held == 0


@pytest.mark.parametrize(
    ("header", "status", "said"),
    [
        (b"Content-Type: text/plain", b"415", b"'text/plain' is not supported: send 'application/json'"),
        (b"Content-Type: Application/JSON ; charset=utf-8", b"200", b""),
        (b"Content-Encoding: zstd", b"415", b"accept-encoding: identity\r\n"),
        (b"Content-Encoding: zstd", b"415", b"'zstd'"),
    ],
)
async def test_an_unsupported_body_is_named(server, header, status, said):
    got = await answer_to(server, HEAD + header + b"\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
    assert got.split()[1] == status
    assert said in got


# -- random requests

LINES = (b"GET /", b"POST /", b"POST /early", b"HEAD /x", b"POST /large", b"GET /endless", b"GET /wait")
HEADERS = (
    *b"Host: x,Content-Length: 10,Content-Length: 70000,Connection: close,Connection: upgrade".split(b","),
    *b"Expect: 100-continue,Transfer-Encoding: chunked,Upgrade: h2c".split(b","),
    *(b"X: " + b"y" * 9000, b"", b"", b""),
)
PARTS = (
    *(line + b" HTTP/1.1\r\n" for line in LINES),
    *(header + b"\r\n" for header in HEADERS),
    *(b"0123456789", bytes(70_000), b"X: y\r\n" * 2000, b"\x00\xff"),
    *(b"a\r\n0123456789\r\n", b"0\r\n", b"0\r\n\r\n", b"5;x=y\r\n01234\r\n"),  # chunks
)
WHOLE = (
    HEAD + b"Content-Length: 10\r\n\r\n0123456789",
    HEAD + CHUNKED + b"a\r\n0123456789\r\n0\r\nT: u\r\n\r\n",
    EARLY + b"Content-Length: 70000\r\n\r\n" + bytes(70_000),
    GET,
)


async def one_client(server, chance):
    """Send parts of requests in pieces, reading or not, then leave or stay."""
    reader, writer = await connect(server)
    parts = [chance.choice(WHOLE if chance.random() < 0.3 else PARTS) for _ in range(chance.randint(1, 12))]
    wire = b"".join(parts)
    sent = wire
    reads = asyncio.create_task(reader.read()) if chance.random() < 0.7 else None
    with contextlib.suppress(ConnectionError):
        while wire:
            size = chance.choice((1, 7, 100, 5000, 100_000))
            writer.write(wire[:size])
            wire = wire[size:]
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.02)
            if size == 1:  # do not send all of it byte by byte
                writer.write(wire[:2000])
                wire = wire[2000:]
    if chance.random() < 0.3:
        writer.transport.abort()
    elif chance.random() < 0.3:
        with contextlib.suppress(OSError):
            writer.write_eof()
    if reads is not None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(reads, 5 * SLOW_S)
    if b"/wait" in sent or b"/endless" in sent:  # these end only with their client
        writer.transport.abort()


@pytest.mark.parametrize("seed", range(2))
async def test_every_connection_ends(server, seed):
    """Each connection has a timer at all times, and ends; afterwards no bytes are counted for it."""
    chance = random.Random(seed)
    clients = [asyncio.create_task(one_client(server, random.Random(chance.random()))) for _ in range(10)]
    while not all(one.done() for one in clients):
        for connection in list(server.uvicorn.server_state.connections):
            assert not connection._timer.cancelled()
        await asyncio.sleep(0.01)
    for one in clients:
        one.result()
    await until(lambda: server.open_connections == 0, "all connections end", 10)
    assert server.held == 0


async def test_a_request_that_has_arrived_is_not_lost_when_the_time_is_over(server):
    """It is in the kernel's buffer when the longest pause between two requests is over."""
    reader, writer = await connect(server)
    for _ in range(2):
        writer.write(GET)
        await one_answer(reader)
    await until(lambda: not server.uvicorn.server_state.tasks, "it is answered")
    (connection,) = server.uvicorn.server_state.connections
    writer.get_extra_info("socket")._sock.send(GET)
    connection._since -= 10 * KEEP_ALIVE_S
    connection._tick()
    assert (await one_answer(reader)).startswith(b"HTTP/1.1 200")
    began = asyncio.get_running_loop().time()
    assert await asyncio.wait_for(reader.read(), CALL_S) == b""
    assert asyncio.get_running_loop().time() - began > KEEP_ALIVE_S / 2


async def test_clients_that_left_do_not_block_others(server):
    """Large bodies of clients that have closed their side use up the room for bodies."""
    server.protocol.limit = MAX_BODY
    part = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % MAX_BODY + bytes(MAX_BODY // 2)
    for _ in range(6):
        _, writer = await connect(server)
        writer.write(part)
        writer.write_eof()
    got = await answer_to(server, HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}")
    assert got.startswith(b"HTTP/1.1 200")
    await until(lambda: server.held == 0, "nothing is held")
