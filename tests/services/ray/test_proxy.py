"""The ingress forwards every request at once: it has no queue of its own."""

import asyncio

import pytest
from aiohttp import web
from starlette.requests import Request

from baton.services.ray.proxy import Proxy
from harness.serving import serving

MOST = 1 << 20
STREAMS = 120  # more than aiohttp's default limit of connections


class Backend:
    def __init__(self):
        self.seen = []
        self.end = asyncio.Event()

    async def answer(self, request):
        await request.read()
        self.seen.append(request)
        response = web.StreamResponse(status=201, headers={"X-Kept": "yes"})
        await response.prepare(request)
        await response.write(b"first ")
        await self.end.wait()
        await response.write(b"last")
        return response


@pytest.fixture
async def backend():
    made = Backend()
    async with serving(made.answer) as address:
        yield made, address
        made.end.set()


def asked(path, query=b""):
    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    headers = [(b"host", b"somewhere"), (b"x-client", b"me")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": query, "headers": headers}
    return Request({**scope, "scheme": "http", "server": ("127.0.0.1", 1)}, receive)


async def test_as_many_streams_as_come_are_open(backend):
    there, address = backend
    proxy = Proxy(f"http://{address}", MOST)
    try:
        async with asyncio.timeout(20):
            answers = await asyncio.gather(
                *(proxy.hand_on(asked("/v1/completions", b"a=b")) for _ in range(STREAMS))
            )
        assert len(there.seen) == STREAMS
        there.end.set()
        bodies = await asyncio.gather(*map(body_of, answers))
        assert set(bodies) == {b"first last"}
    finally:
        await proxy.close()
    assert (answers[0].status_code, answers[0].headers["X-Kept"]) == (201, "yes")
    assert answers[0].headers["X-Baton-Router"] == f"http://{address}"
    assert there.seen[0].path_qs == "/v1/completions?a=b"
    assert (there.seen[0].headers["x-client"], there.seen[0].host) == ("me", address)


async def body_of(answer):
    return b"".join([bytes(piece) async for piece in answer.body_iterator])


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_the_router_would_refuse_is_not_kept(backend, declared):
    made, address = backend
    pieces = 0

    async def receive():
        nonlocal pieces
        pieces += 1
        return {"type": "http.request", "body": bytes(1 << 16), "more_body": True}

    length = [(b"content-length", b"%d" % (MOST + 1))] if declared else []
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": length}
    proxy = Proxy(f"http://{address}", MOST)
    answer = await proxy.hand_on(Request(scope, receive))
    await proxy.close()
    assert answer.status_code == 413
    assert pieces <= (MOST >> 16) + 1
    assert made.seen == []
