"""The limits of an HTTP connection, each tested by a raw socket with a small application."""

import asyncio
import contextlib
import json
import socket

import pytest

from baton.services.router.http import connections as module
from baton.services.router.http.limits import MAX_HEADER_BYTES
from harness.doors import MAX_BODY, SLOW_S, Seen, answer_to, connect, one_answer, serving
from harness.fake_worker import until
from harness.support import CALL_S, PATIENCE, PYTHON, ran

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def exchange(server, *pieces, every_s=0.0):
    reader, writer = await connect(server)
    answer = asyncio.create_task(reader.read(1 << 16))
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            if answer.done():
                break
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every_s)
    got = await asyncio.wait_for(answer, 20 * PATIENCE)
    writer.close()
    head, _, body = got.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    return status, json.loads(body)["error"] if status >= 400 else {}


async def test_a_request_within_its_limits_passes(server):
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % MAX_BODY
    got, _ = await exchange(server, head, bytes(MAX_BODY))
    assert (got, server.seen.bodies) == (200, [MAX_BODY])


async def test_a_declared_body_that_is_too_large(server):
    status, error = await exchange(server, HEAD + b"Content-Length: %d\r\n\r\n" % (MAX_BODY + 1))
    assert (status, error["code"], error["type"]) == (413, 413, "RequestEntityTooLargeError")
    assert "router.max_body_mib" in error["message"]
    assert (server.seen.bodies, server.seen.refused) == ([], ["413"])


async def test_a_chunked_body_that_is_too_large(server):
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    status, error = await exchange(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 64)
    assert (status, error["code"]) == (413, 413)
    await until(lambda: server.seen.left == 1, "the application sees that its client has left")


async def test_a_refused_client_may_finish_sending(server):
    """A client that reads only after it has sent everything gets the response, not a reset."""
    size = 8 * MAX_BODY
    got = await answer_to(server, HEAD + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
    assert got.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"X: " + b"x" * MAX_HEADER_BYTES + b"\r\n\r\n",
        HEAD + b"X: y\r\n" * MAX_HEADER_BYTES,
        b"GET /" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"X: " + b"x" * (8 * MAX_HEADER_BYTES),  # the header never ends
    ],
    ids=["long", "many", "path", "endless"],
)
async def test_too_many_headers(server, head):
    status, error = await exchange(server, head)
    assert (status, error["code"]) == (431, 431)


@pytest.mark.parametrize(
    ("part", "filler"),
    [(b"", b""), (b"", b"\r\n"), (HEAD, b"x"), (HEAD + b"Content-Length: 1000\r\n\r\n", b"x")],
    ids=["nothing", "line breaks", "headers", "body"],
)
async def test_a_request_that_never_ends(server, part, filler):
    status, error = await exchange(server, part, *[filler] * 50, every_s=SLOW_S / 10)
    assert (status, error["type"]) == (408, "RequestTimeoutError")
    assert server.seen.bodies == []
    await until(lambda: server.open_connections == 0, "all connections end")


async def test_a_line_break_after_an_answer_holds_nothing(server):
    reader, writer = await connect(server)
    writer.write(GET)
    await one_answer(reader)
    writer.write(b"\r\n")
    await until(lambda: server.open_connections == 0, "the connection is cut")


async def test_garbage_is_400_in_the_usual_form(server):
    status, error = await exchange(server, b"\x16\x03\x01 not http\r\n\r\n")
    assert (status, error["type"]) == (400, "BadRequestError")


async def test_too_many_connections_are_503():
    async with serving(Seen(), max_connections=3) as server:
        for _ in range(3):
            await connect(server)
        await until(lambda: server.open_connections == 3, "three clients are connected")
        got = await answer_to(server, HEAD + b"Content-Length: 0\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\n" in got
        status, _ = await exchange(server, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert status == 200  # health stays available


async def test_far_too_many_connections_are_dropped(monkeypatch):
    monkeypatch.setattr(module, "SPARE_CONNECTIONS", 1)
    seen = Seen()
    async with serving(seen, max_connections=1) as server:
        for _ in range(2):
            await connect(server)
        await until(lambda: server.open_connections == 2, "two clients are connected")
        with contextlib.suppress(ConnectionError):
            assert await answer_to(server, b"") == b""
        assert seen.refused == ["dropped"]


async def test_the_largest_of_too_many_bodies_is_503(monkeypatch):
    monkeypatch.setattr(module, "BODIES_AT_ONCE", 2)
    async with serving(Seen()) as server:
        part = HEAD + b"Content-Length: %d\r\n\r\n" % MAX_BODY + bytes(MAX_BODY - 1)
        half = [await connect(server) for _ in range(2)]
        for _, writer in half:
            writer.write(part)
            await writer.drain()
        await until(lambda: server.held == 2 * (MAX_BODY - 1), "both are counted")
        small = HEAD + b"Connection: close\r\nContent-Length: 1000\r\n\r\n" + bytes(1000)
        for _ in range(3):
            assert (await exchange(server, small))[0] == 200  # slow clients do not block others
        await until(lambda: server.held == MAX_BODY - 1, "one of them is refused")
        answers = []
        for reader, writer in half:
            writer.write(b"x")
            answers.append(await reader.read(1 << 16))
        (refused,) = (one for one in answers if not one.startswith(b"HTTP/1.1 200"))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"(2 times router.max_body_mib)" in refused
        assert b"retry-after: 1\r\n" in refused
        await until(lambda: server.held == 0, "nothing is held")


@pytest.mark.parametrize("path", [b"endless", b"large"])
async def test_a_client_that_reads_nothing_is_cut_off(server, path):
    """A large answer is written in one piece: the application does not wait to write more."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with client:
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % path)
        if path == b"large":
            await until(lambda: server.seen.sent > 0, "it is answered")
            await until(lambda: server.open_connections == 0, "the connection is cut")
            return
        await until(lambda: server.seen.left == 1, "it is cut off")
    assert server.seen.refused == ["unread"]
    assert server.seen.sent < 16 << 20  # only what the kernel buffers


async def test_a_client_that_reads_slowly_stays():
    """The client reads something between any two checks."""
    slow_s = 4 * SLOW_S  # longer than a busy machine stalls
    async with serving(Seen(), slow_s=slow_s) as server:
        reader, writer = await connect(server)
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(14):  # until after the second check
            assert await reader.read(1 << 20)
            await asyncio.sleep(slow_s / 6)
        assert server.seen.left == 0
        writer.close()
        await until(lambda: server.seen.left == 1, "it is cut off")


async def test_leaving_with_pipelined_requests_is_noticed(server):
    """The first request, which is being answered, is cancelled; the second never begins."""
    _, writer = await connect(server)
    writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
    await until(lambda: len(server.seen.bodies) == 1, "the first is running")
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await until(lambda: server.seen.left == 1, "the application sees it")
    assert len(server.seen.bodies) == 1


@pytest.mark.parametrize("before", ["nothing", "half a request", "a response", "a response under way"])
async def test_an_ending_router_answers_requests_in_flight(server, before):
    """Each connection gets one more response before it ends."""
    reader, writer = await connect(server)
    await until(lambda: server.open_connections == 1, "it is connected")
    rest = GET
    if before == "half a request":
        writer.write(GET[:9])
        rest = GET[9:]
    elif before != "nothing":
        writer.write(GET if before == "a response" else GET.replace(b"/", b"/gate", 1))
        part = reader.readuntil(b"first") if "under way" in before else one_answer(reader)
        await asyncio.wait_for(part, CALL_S)
    server.uvicorn.should_exit = True
    await until(lambda: not server.uvicorn.servers[0].is_serving(), "it accepts nothing more")
    server.seen.gate.set()
    if before == "a response under way":
        await one_answer(reader)
    writer.write(rest)
    head, _, _ = (await asyncio.wait_for(reader.read(), CALL_S)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in head


async def test_an_ending_router_closes_idle_connections(server, monkeypatch):
    monkeypatch.setattr(module, "LAST_REQUEST_S", SLOW_S / 4)  # before the 408
    unused, _one = await connect(server)
    kept, writer = await connect(server)
    writer.write(GET)
    await one_answer(kept)
    server.uvicorn.should_exit = True
    assert await asyncio.wait_for(unused.read(), CALL_S) == await asyncio.wait_for(kept.read(), CALL_S) == b""


@pytest.mark.parametrize(
    ("soft", "hard", "taken", "left"),
    [(256, 8192, 4096, 4864), (10_000, 20_000, 4096, 10_000), (256, 1024, 256, 1024), (256, 300, 1, 300)],
    ids=["raised", "enough", "too few", "far too few"],
)
def test_no_more_connections_than_file_descriptors(soft, hard, taken, left):
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from baton.services.router.http.limits import affordable_connections\n"
        "print(affordable_connections(4096), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = ran(PYTHON, "-c", code, check=True)
    assert done.stdout.split() == [str(taken), str(left)]
    assert ("connections are wanted" in done.stderr) == (taken < 4096)
