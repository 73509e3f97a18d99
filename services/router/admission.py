"""An error before the first byte is an HTTP error, also where a stream was asked for.

vLLM's streaming handlers answer 200 before the engine client is asked for anything, so a refusal could only
follow as an event. Here the response's start waits for the body's first chunk; if the request failed by
then, the client gets its status, OpenAI's error object and Retry-After instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from baton.services.router.errors import RequestFailed

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Admission:
    """One HTTP request's fate, as those who carry it out see it. The first error counts."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: RequestFailed | None = None

    def refuse(self, error: RequestFailed) -> None:
        if self.error is None:
            self.error = error


# Set for each HTTP request; tasks that handle it inherit it.
current_admission: ContextVar[Admission | None] = ContextVar("baton_admission", default=None)


class AdmissionMiddleware:
    """Pure ASGI. After the first chunk it costs one function call a chunk."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        admission = Admission()
        current_admission.set(admission)
        await self._app(scope, receive, _HeldResponse(admission, send))


class _HeldResponse:
    """A `send` that keeps http.response.start until the first chunk shows how the request went."""

    __slots__ = ("_admission", "_send", "_start", "_state")

    def __init__(self, admission: Admission, send: Send) -> None:
        self._admission = admission
        self._send = send
        self._start: Message | None = None
        self._state: Send = self._held

    def __call__(self, message: Message) -> Awaitable[None]:
        return self._state(message)

    async def _held(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        error = self._admission.error
        if error is not None:
            self._state = self._replaced
            for part in error_response(error):
                await self._send(part)
            return
        self._state = self._send
        if self._start is not None:
            await self._send(self._start)
        await self._send(message)

    async def _replaced(self, message: Message) -> None:
        del message  # of the response that the client does not get


def error_response(error: RequestFailed) -> tuple[Message, Message]:
    """The two ASGI messages of an answer in OpenAI's error format."""
    kind = "".join(word.capitalize() for word in error.status.phrase.split())
    fields = {"message": error.message, "type": f"{kind}Error", "param": None, "code": error.status.value}
    body = json.dumps({"error": fields}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    start = {"type": "http.response.start", "status": error.status.value, "headers": headers}
    return start, {"type": "http.response.body", "body": body, "more_body": False}
