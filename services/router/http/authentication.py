"""Authentication: with an API key set, every path needs it but the few that health checks use.

A path that is not listed is closed, so that routes that vLLM adds are closed, too. A listed path is compared
as a whole with the one that the routes see: any other spelling of it is closed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

from baton.services.router.errors import Unauthorized
from baton.services.router.http.admission import App, Receive, Scope, Send, error_response

OPEN = frozenset({"/health", "/ping", "/version"})
METRICS = "/metrics"
_POLICY_VIOLATION = 1008  # close code of a WebSocket


class KeyMiddleware:
    """Pure ASGI middleware that checks path and headers alone, before a request's body is read.

    Its place is right inside the CORS middleware. That answers a browser's preflight, which can carry no key,
    by itself; an OPTIONS that is no preflight would reach mounted apps, and needs the key. `refused` is
    called with "401" for each request without one.
    """

    def __init__(
        self, app: App, keys: Iterable[str], metrics_open: bool, refused: Callable[[str], None]
    ) -> None:
        """Accept any of `keys`. With `metrics_open` /metrics needs none."""
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = OPEN | {METRICS} if metrics_open else OPEN
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open or self._has_key(scope["headers"]):
            await self._app(scope, receive, send)
            return
        self._refused(str(Unauthorized.status.value))
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        start, body = error_response(
            Unauthorized("an API key is needed, and the right one: send it as 'Authorization: Bearer KEY'")
        )
        start["headers"].append((b"www-authenticate", b"Bearer"))
        await send(start)
        await send(body)

    def _has_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        for name, value in headers:
            scheme, _, key = value.partition(b" ")
            if name == b"authorization" and scheme.lower() == b"bearer":
                given = _digest(key.strip())
                # Compare with all keys, so that the duration does not reveal which one it was.
                return sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0
        return False


def _digest(key: bytes) -> bytes:
    """Return a digest of the key: of one length, whatever the key's."""
    return hashlib.sha256(key).digest()
