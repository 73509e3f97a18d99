"""Streams through proxies: headers that prevent buffering, and comments that prevent timeouts.

Clients ignore comments (`: keep-alive`). A comment before the first event starts the response
(docs/decisions/0015).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.types import Message, Send

from baton.tasks import spawn

COMMENT = b": keep-alive\n\n"
_EVENTS = b"text/event-stream"
# nginx buffers a response until its buffers are full; caches and some proxies do so until it ends.
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def streams(start: Message) -> bool:
    """Return whether an http.response.start begins an event stream."""
    return any(name == b"content-type" and value.startswith(_EVENTS) for name, value in start["headers"])


def mark(start: Message) -> None:
    """Tell proxies not to buffer or cache the stream."""
    known = {name for name, _ in start["headers"]}
    start["headers"] = [*start["headers"], *(one for one in _HEADERS if one[0] not in known)]


class Comments:
    """A `send` that adds comments to a silent stream once `begin` is called; none if `every_s` is 0.

    Send parts of the response to `sender`; `pass_on` is the wrapped `send`. A task runs until the response is
    complete or `end` is called.
    """

    def __init__(self, send: Send, every_s: float) -> None:
        self.pass_on = send
        self.sender: Send = self.send if every_s else send  # without comments, send directly
        self._every_s = every_s
        self._turn = asyncio.Lock()  # parts are sent one after another
        self._last = 0.0  # time.monotonic of the last part
        self._task: asyncio.Task[None] | None = None

    def begin(self, before: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Start to watch the stream. `before` starts the response and returns whether it could."""
        if self._every_s:
            self._last = time.monotonic()
            self._task = spawn(self._add_comments(before), "comments on a silent stream")

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def send(self, message: Message) -> None:
        async with self._turn:
            await self.pass_on(message)
            self._last = time.monotonic()
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.end()

    async def _add_comments(self, before: Callable[[], Awaitable[bool]] | None) -> None:
        while True:
            await asyncio.sleep(self._last + self._every_s - time.monotonic())
            async with self._turn:  # a part that the client has not read yet does not count as silence
                if time.monotonic() < self._last + self._every_s:
                    continue
                if before is None or await before():
                    await self.pass_on({"type": "http.response.body", "body": COMMENT, "more_body": True})
                self._last = time.monotonic()


def passing(send: Send, every_s: float) -> Comments:
    """Return a `send` for responses that are not held; streams get headers and comments."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start" and streams(message):
            mark(message)
            comments.begin()
        await send(message)

    comments = Comments(marked, every_s)
    return comments
