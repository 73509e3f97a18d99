"""The ingress' way to the router beside it: each request is handed on as it came, its answer as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from starlette.requests import Request
from starlette.responses import StreamingResponse

# Between two hops, not of the message (RFC 9110, section 7.6.1); the length is that of what is sent on.
_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


class Proxy:
    """Hands requests on to one router. To be made in the loop that uses it."""

    def __init__(self, url: str) -> None:
        """Hand on to the router at `url`."""
        self._url = url
        self._session = aiohttp.ClientSession(
            trust_env=False,  # no proxy of the environment
            connector=aiohttp.TCPConnector(limit=0),  # the router's own limits answer, and do not wait
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """End the connections."""
        await self._session.close()

    async def hand_on(self, request: Request) -> StreamingResponse:
        """Return the answer once it begins. A caller that is cancelled ends the request there, too."""
        url = f"{self._url}{request.url.path}{'?' + request.url.query if request.url.query else ''}"
        headers = [(key, value) for key, value in request.headers.items() if key.lower() not in _HOP]
        answer = await self._session.request(request.method, url, headers=headers, data=await request.body())
        kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP}

        async def body() -> AsyncIterator[bytes]:
            async with answer:
                async for chunk in answer.content.iter_any():
                    yield chunk

        return StreamingResponse(body(), answer.status, {**kept, "X-Baton-Router": self._url})
