"""Authentication: once an API key is set, every path except a few for health checks needs one.

OpenAI's and Anthropic's headers work on every path. Unlisted paths and other spellings of listed ones are
closed, so routes that a new vLLM adds are closed too.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.services.router.chronicle import log_without_sequence
from baton.services.router.errors import NotAllowed, RequestFailed, Unauthorized
from baton.services.router.http.forms import error_response
from baton.services.tenants.keyring import Keyring
from baton.services.tenants.model import ANYBODY, Caller, digest

CALLER = "baton.caller"  # scope key: the Caller that the API key belongs to
OPEN = frozenset({"/health", "/ping", "/version"})
METRICS = "/metrics"
# These cover all tenants together, so a tenant's key does not open them.
OF_ALL_TENANTS = (METRICS, "/load")
_NOT_FOR_TENANTS = "this covers all tenants, so a tenant's key does not open it: use router.metrics_port"
_POLICY_VIOLATION = 1008  # WebSocket close code


def keys_in(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the distinct API keys in a request's headers."""
    found: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            key = key.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            key = value.strip()
        else:
            continue
        if key and key not in found:
            found.append(key)
    return found


class FixedKeys:
    """A fixed set of keys that all belong to one caller without limits; a Keyring without tenants."""

    problem = ""  # fixed keys can always be checked

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [digest(key.encode()) for key in keys]

    def find(self, secret: bytes) -> Caller | None:
        given = digest(secret)
        # Compare with every key, or the time taken would reveal which one matched.
        known = sum(hmac.compare_digest(given, one) for one in self._digests)
        return ANYBODY if known else None


class KeyMiddleware:
    """Pure ASGI middleware that checks the path and the headers before the body is read.

    Place it directly inside the CORS middleware, which answers browsers' preflights: they cannot carry a
    key. Any other OPTIONS request would reach mounted apps, so it needs a key. `refused` is called with the
    status of each refusal.
    """

    def __init__(self, app: ASGIApp, keys: FixedKeys | Keyring, refused: Callable[[str], None]) -> None:
        self._app = app
        self._keys = keys
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        keys = keys_in(scope["headers"])
        caller = self._keys.find(keys[0]) if len(keys) == 1 else None
        if caller is None:
            await self._refuse(scope, send, self._error(len(keys)))
        elif caller.tenant and scope["type"] == "http" and _of_all_tenants(scope["path"]):
            await self._refuse(scope, send, NotAllowed(_NOT_FOR_TENANTS))
        else:
            scope[CALLER] = caller
            await self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, send: Send, error: RequestFailed) -> None:
        self._refused(str(error.status.value))
        log_without_sequence(error.status.value, scope["path"], error=error.message)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        start, body = error_response(error)
        if isinstance(error, Unauthorized):
            start["headers"].append((b"www-authenticate", b"Bearer"))
        await send(start)
        await send(body)

    def _error(self, keys: int) -> RequestFailed:
        if self._keys.problem:
            return RequestFailed(f"the router cannot check API keys yet: {self._keys.problem}", 1.0)
        if keys > 1:
            return Unauthorized(
                "the headers Authorization and x-api-key hold two different API keys: send one of them"
            )
        return Unauthorized(
            "a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        )


def _of_all_tenants(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in OF_ALL_TENANTS)
