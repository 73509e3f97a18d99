"""The choice of a model: each request goes to the app of the model, or of the adapter, that its body names.

It costs one look into the body, which skips over what it does not need, and one look into a dictionary,
however many models there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from baton.services.router.errors import NoSuchModel, RequestFailed, Unsupported
from baton.services.router.http.admission import current_admission
from baton.services.router.http.forms import App, Message, Receive, Scope, Send, error_response, route_path


class _Named(msgspec.Struct):
    model: Any = None


_decoder = msgspec.json.Decoder(_Named)


def model_in(body: bytes) -> Any:
    """Return the field `model` of a request's body, of whatever type; None without one, or without an object.

    What is not valid JSON has none either: the front end's own check refuses it.
    """
    try:
        return _decoder.decode(body).model
    except msgspec.ValidationError:
        return None  # no object
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # perhaps of another encoding, or with NaN: Python's own parser takes more, and so does vLLM's
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found.get("model") if isinstance(found, dict) else None


class ModelMiddleware:
    """Pure ASGI middleware, to be the innermost of an app: it reads the body, which admission has checked."""

    def __init__(self, app: App, apps: Mapping[str, App | None], paths: frozenset[str]) -> None:
        """Hand requests on these `paths` to `apps`, by model; None stands for `app`, which has all others."""
        self._app = app
        self._apps = apps
        self._paths = paths
        self._served = ", ".join(apps)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        if body is None:
            return  # the client left before it had sent its request
        try:
            app = self._chosen(model_in(body))
        except RequestFailed as error:
            if (admission := current_admission.get()) is not None:
                admission.refuse(error)
            for part in error_response(error):
                await send(part)
            return
        await app(scope, _again(body, receive), send)

    def _chosen(self, name: Any) -> App:
        """Return the app for a request. Raises Unsupported (400) and NoSuchModel (404)."""
        if name is None or name == "":
            raise Unsupported(
                f"several models are served here: name one in the field 'model': {self._served}"
            )
        if not isinstance(name, str):
            return self._app  # whose check of types refuses it
        if name not in self._apps:
            raise NoSuchModel(f"The model `{name}` does not exist. Served here: {self._served}.")
        return self._apps[name] or self._app


async def _whole(receive: Receive) -> bytes | None:
    """Read a request's body; None if its client leaves. Its size was limited by the connection."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body which was read, and then what follows it."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def again() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None
        return message

    return again
