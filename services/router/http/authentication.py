"""Authentication: if an API key is set, every path needs it except the few that health checks use.

A path that is not listed is closed, so routes that vLLM adds are closed, too. A listed path must equal the
path that the routes see: any other spelling is closed.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from typing import Protocol

from baton.services.router.chronicle import log_without_sequence
from baton.services.router.errors import KeysUnknown, NotAllowed, RequestFailed, Unauthorized
from baton.services.router.http import presented
from baton.services.router.http.admission import CALLER
from baton.services.router.http.forms import App, Receive, Scope, Send, error_response
from baton.services.tenants.model import ANYBODY, Caller, digest

OPEN = frozenset({"/health", "/ping", "/version"})
METRICS = "/metrics"
# These paths describe all tenants together, so no tenant may see them, whatever its key.
OF_ALL_TENANTS = (METRICS, "/load")
_NOT_FOR_TENANTS = (
    "this is about all tenants, so no tenant's key opens it: operators read it at router.metrics_port"
)
_POLICY_VIOLATION = 1008  # close code of a WebSocket


class Keys(Protocol):
    """The keys that open a router."""

    @property
    def problem(self) -> str:
        """The reason why no key is known yet, in one line; "" once keys are known."""

    def find(self, secret: bytes) -> Caller | None:
        """Return the caller that a secret belongs to, or None."""


class FixedKeys:
    """Keys of one tenant without limits, the same until the router ends."""

    problem = ""  # they are known from the start

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [digest(key.encode()) for key in keys]

    def find(self, secret: bytes) -> Caller | None:
        """Return the one caller for each of the keys."""
        given = digest(secret)
        # Compare with all keys, so that the duration does not reveal which one it was.
        known = sum(hmac.compare_digest(given, one) for one in self._digests)
        return ANYBODY if known else None


class KeyMiddleware:
    """Pure ASGI middleware that checks path and headers alone, before a request's body is read.

    Its place is right inside the CORS middleware. That answers a browser's preflight, which can carry no key,
    by itself; an OPTIONS that is no preflight would reach mounted apps, and needs the key. `refused` is
    called with the status for each request that does not pass.
    """

    def __init__(self, app: App, keys: Keys, refused: Callable[[str], None]) -> None:
        """Accept any of `keys`."""
        self._app = app
        self._keys = keys
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        caller = self._caller(scope["headers"])
        if caller is not None:
            if caller.tenant and scope["type"] == "http" and _of_all_tenants(scope["path"]):
                await self._refuse(scope, send, NotAllowed(_NOT_FOR_TENANTS))
                return
            scope[CALLER] = caller
            await self._app(scope, receive, send)
            return
        await self._refuse(scope, send, self._error(scope["headers"]))

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

    def _caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        keys = presented.keys_in(headers)
        return self._keys.find(keys[0]) if len(keys) == 1 else None

    def _error(self, headers: Iterable[tuple[bytes, bytes]]) -> RequestFailed:
        if self._keys.problem:
            return KeysUnknown(f"the router cannot check API keys yet: {self._keys.problem}", 1.0)
        if len(presented.keys_in(headers)) > 1:
            return Unauthorized(
                "the headers Authorization and x-api-key hold two different API keys: send one of them"
            )
        return Unauthorized(
            "an API key is needed, and the right one: send it as 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'"
        )


def _of_all_tenants(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in OF_ALL_TENANTS)
