"""A fake router that fails on demand."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from harness.serving import serving


def completion(text):
    choice = {"index": 0, "text": text, "token_ids": [1, 2], "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return {"id": f"cmpl-{text}", "choices": [choice], "usage": usage}


async def ok(_router, request, _seen):
    return web.json_response(completion(str((await request.json())["prompt"])))


async def full(router, request, seen):
    if seen > 2:
        return await ok(router, request, seen)
    return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": "0.1"})


async def bad(*_):
    return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)


async def broken(_router, request, _seen):
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def held(router, request, seen):
    router.held += 1
    if router.held == router.crowd:
        router.crowded.set()
    await router.released.wait()
    router.held -= 1
    return await ok(router, request, seen)


async def _stream(request, *pieces):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0.02)
    return response


async def streamed(_router, request, _seen):
    """Stream two events, with comments between them and splits in awkward places."""
    pieces = b": keep-alive\n\n", b'data: {"te', b'xt": "a"}\n', b"\n: keep-alive", b"\n\n"
    return await _stream(request, *pieces, b'data: {"text": "b"}\r\n\r\n', b"data: [DONE]\n\n")


async def garbled(_router, request, _seen):
    return await _stream(request, b"data: oops\n\n")


async def endless(_router, request, _seen):
    return await _stream(request, b"data: ", b"x" * 2048)


async def halves(*_):
    return web.json_response(completion("\ud83d"))


REPLIES = {one.__name__: one for one in (full, bad, broken, held, streamed, garbled, endless, halves)}


@dataclass
class Router:
    """A router that replies by prompt: `full-1` gets the reply of `full`, unknown words that of `ok`."""

    url: str = ""
    seen: Counter[str] = field(default_factory=Counter)
    keys: set[str] = field(default_factory=set)  # Authorization headers received
    under_way: int = 0
    most: int = 0  # maximum number of concurrent requests so far
    held: int = 0
    crowd: int = 0  # `crowded` is set when this many are held
    crowded: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        prompt = str((await request.json())["prompt"])
        self.seen[prompt] += 1
        self.keys.add(request.headers.get("Authorization", ""))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0)
            return await REPLIES.get(prompt.split("-")[0], ok)(self, request, self.seen[prompt])
        finally:
            self.under_way -= 1


@asynccontextmanager
async def router():
    one = Router()
    async with serving(one.answer, shutdown_timeout=1) as place:
        one.url = f"http://{place}"
        try:
            yield one
        finally:
            one.released.set()
