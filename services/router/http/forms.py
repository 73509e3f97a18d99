"""Error responses in the form of the API that the client called: OpenAI's or Anthropic's.

The app, including vLLM's handlers, answers in OpenAI's form; `ErrorForms`, around the whole app, translates.
Responses that bypass the app, and error events inside Anthropic's streams, use `anthropic_error`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.services.router.errors import RequestFailed

_MESSAGES = "/v1/messages"
_MODELS = "/v1/models"  # both APIs have this path; only Anthropic's clients send a version header
_VERSION = b"anthropic-version"
_MOST_BYTES = 1 << 20  # the largest error response that is translated
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# Python 3.13 renamed these; clients see the same types with every version.
_PHRASES = {413: "Request Entity Too Large", 422: "Unprocessable Entity"}


def is_anthropics(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request is for Anthropic's API. `path`: without a proxy's prefix."""
    if path.startswith(_MESSAGES):
        return path == _MESSAGES or path[len(_MESSAGES)] == "/"
    return path.startswith(_MODELS) and any(name == _VERSION for name, _ in headers)


def route_path(scope: Scope) -> str:
    """Return the path without a proxy's prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def openai_error(error: RequestFailed) -> dict[str, Any]:
    phrase = _PHRASES.get(error.status, error.status.phrase)
    kind = error.kind or "".join(word.capitalize() for word in phrase.split()) + "Error"
    code: str | int = error.code or error.status.value
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def error_response(error: RequestFailed, *, anthropics: bool = False) -> tuple[Message, Message]:
    """Return the two ASGI messages of an error response."""
    content = anthropic_error(error.status, error.message) if anthropics else openai_error(error)
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status is HTTPStatus.SERVICE_UNAVAILABLE or error.retry_after_s:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if error.final:
        headers.append((b"x-should-retry", b"false"))
    start = {"type": "http.response.start", "status": error.status.value, "headers": headers}
    return start, {"type": "http.response.body", "body": body, "more_body": False}


def as_response(error: RequestFailed) -> Response:
    start, body = error_response(error)
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Response(body["body"], status_code=start["status"], headers=headers)


async def send_error(send: Send, error: RequestFailed) -> None:
    for part in error_response(error):
        await send(part)


class ErrorForms:
    """Pure ASGI middleware around the whole app. It costs other APIs one comparison per request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_anthropics(route_path(scope), scope["headers"]):
            send = _Translated(send)
        await self._app(scope, receive, send)


class _Translated:
    """A `send` that holds back an error response until it is complete, and sends it in Anthropic's form."""

    __slots__ = ("_body", "_send", "_start")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # the start of an error response
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        if len(self._body) < _MOST_BYTES:
            self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        start, self._start = self._start, None
        body = json.dumps(anthropic_error(start["status"], _said(bytes(self._body)))).encode()
        kept = [pair for pair in start["headers"] if pair[0] not in (b"content-type", b"content-length")]
        length = (b"content-length", str(len(body)).encode())
        await self._send({**start, "headers": [*kept, (b"content-type", b"application/json"), length]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _said(body: bytes) -> str:
    try:
        found = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
    return str(found)
