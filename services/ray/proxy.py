"""Forward the ingress's requests to its router unchanged, and stream the answers back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

# Hop-by-hop headers (RFC 9110, section 7.6.1), and the length, which aiohttp sets again.
_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


class Proxy:
    """Forwards requests to one router. Create it in the event loop that uses it."""

    def __init__(self, url: str, max_body: int) -> None:
        """Forward to the router at `url`, which takes bodies of at most `max_body` bytes."""
        self._url = url
        self._max_body = max_body
        self._session = aiohttp.ClientSession(
            trust_env=False,  # ignore proxies in the environment
            connector=aiohttp.TCPConnector(limit=0),  # the router has limits of its own
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def hand_on(self, request: Request) -> Response:
        """Return the answer once it begins. Cancelling this call also cancels the router's request."""
        body = await self._body(request)
        if body is None:
            mib = self._max_body / (1 << 20)
            message = f"the request's body exceeds {mib:g} MiB (router.max_body_mib)"
            error = {"message": message, "type": "RequestEntityTooLargeError", "param": None, "code": 413}
            return JSONResponse({"error": error}, 413)
        url = f"{self._url}{request.url.path}{'?' + request.url.query if request.url.query else ''}"
        headers = [(key, value) for key, value in request.headers.items() if key.lower() not in _HOP]
        answer = await self._session.request(request.method, url, headers=headers, data=body)
        kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP}

        async def pieces() -> AsyncIterator[bytes]:
            async with answer:
                async for chunk in answer.content.iter_any():
                    yield chunk

        return StreamingResponse(pieces(), answer.status, {**kept, "X-Baton-Router": self._url})

    async def _body(self, request: Request) -> bytes | None:
        """Return a request's body, or None if it is larger than the router accepts."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body:
            return None
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:
                return None
        return bytes(body)
