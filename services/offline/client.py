"""An HTTP client of a router, with bounded concurrency and retries.

Requests are retried while the router is full (503 with Retry-After) or restarting (no response). When no
request has had a response for `PATIENCE_S`, all requests fail with Unavailable.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import aiohttp

from baton.services.offline.errors import RequestError, Unavailable

PATIENCE_S = 120.0  # longest time without any response: a large model takes a minute or more to restart
MAX_LOST = 3  # broken connections for one request, which may itself be the cause
_CONNECT_S = 10.0
_GRACE_S = 30.0  # the router ends a request that takes too long; the client does so this much later
_PAUSE_S = 1.0  # pause if there is no Retry-After
_MAX_PAUSE_S = 30.0
_RETRIED = {429, 503}
_JSON = {"Content-Type": "application/json"}
_SHOWN = 200  # bytes shown of an unreadable answer
MOST_BYTES = 64 << 20  # largest event

T = TypeVar("T")
Body = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    url: str  # http://host:port, without /v1
    request_timeout_s: float  # router.request_timeout_s
    api_key: str = ""
    check: Callable[[], None] = field(default=lambda: None)  # raises OfflineError if the deployment has ended


@dataclass(frozen=True)
class HttpResponse:
    status: int
    body: Body  # parsed JSON, an error object where the status is not 200

    @property
    def ok(self) -> bool:
        return self.status == 200

    def error(self) -> RequestError:
        return RequestError(_message(self.body), self.status)


class Client:
    """Sends requests to one endpoint, at most `concurrency` at a time. Create it in the loop that uses it."""

    def __init__(self, endpoint: Endpoint, concurrency: int) -> None:
        self._endpoint = endpoint
        self.concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._session = aiohttp.ClientSession(
            endpoint.url,
            headers=headers,
            trust_env=False,  # ignore proxies in the environment
            connector=aiohttp.TCPConnector(limit=0),  # the slots are the limit
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_S, sock_read=endpoint.request_timeout_s + _GRACE_S
            ),
        )
        self._answered = time.monotonic()  # when any request last got a response

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """Return the names of the served models. Raises Unavailable, RequestError."""
        async with self._request("GET", "/v1/models", None) as response:
            answer = await _read(response)
        if not answer.ok:
            raise answer.error()
        return [one["id"] for one in answer.body["data"]]

    async def post(self, path: str, body: Body) -> HttpResponse:
        """Send a request and return the whole response, whatever its status.

        Raises RequestError if this request got no response; Unavailable, or what `Endpoint.check` raises, if
        no request gets one.
        """
        lost = 0
        async with self._slots:
            while True:
                try:
                    async with self._request("POST", path, body) as response:
                        answer = await _read(response)
                        self._answered = time.monotonic()
                        return answer
                except _ConnectionLost as error:
                    lost += 1
                    if lost == MAX_LOST:
                        raise RequestError(f"the connection was lost {lost} times: {error}") from None

    async def stream(self, path: str, body: Body) -> AsyncIterator[Body]:
        """Yield the events of a streamed response. Raises like `post`, and RequestError for bad statuses."""
        async with self._slots, self._request("POST", path, {**body, "stream": True}) as response:
            if response.status != 200:
                raise (await _read(response)).error()
            async for event in _events(response):
                self._answered = time.monotonic()
                if "error" in event:
                    raise RequestError(_message(event), _code(event))
                yield event

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Body | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request until it is admitted; the context is its response.

        Raises _ConnectionLost if the connection breaks after the request was sent, even within the context.
        """
        began = time.monotonic()
        try:
            data = None if body is None else json.dumps(body).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"the request cannot be written as JSON: {error}") from None
        try:
            response = await self._admitted(method, path, data, began)
            async with response:
                yield response
        except TimeoutError:
            self._endpoint.check()
            raise RequestError(f"no response after {time.monotonic() - began:.0f} s") from None
        except aiohttp.ClientError as error:
            self._endpoint.check()
            raise _ConnectionLost(str(error) or type(error).__name__) from error

    async def _admitted(
        self, method: str, path: str, data: bytes | None, began: float
    ) -> aiohttp.ClientResponse:
        while True:
            try:
                response = await self._session.request(method, path, data=data, headers=_JSON)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                pause, problem = _PAUSE_S, f"{self._endpoint.url}: {error}"
            else:
                if response.status not in _RETRIED:
                    return response
                pause = _retry_after(response.headers.get("Retry-After", ""))
                problem = (await _read(response)).error().args[0]
            self._endpoint.check()
            waited_since = max(began, self._answered)
            if time.monotonic() + pause - waited_since > PATIENCE_S:
                raise Unavailable(f"no request got a response for {PATIENCE_S:.0f} s: {problem}")
            if time.monotonic() - began > self._endpoint.request_timeout_s:
                raise RequestError(f"never admitted, while other requests were: {problem}", 503)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 (jitter)


class _ConnectionLost(RequestError):
    """The connection broke after the request was sent; the router may have run the request."""


async def each(items: Iterator[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """Call `work` with every item, at most `at_once` at a time. Items are taken as they are needed.

    The first exception cancels all calls and is raised.
    """

    async def take() -> None:
        for item in items:
            await work(item)

    tasks = [asyncio.create_task(take()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Body]:
    """Yield the JSON of server-sent events until [DONE]. Raises RequestError if the stream ends early.

    A router writes each event as one line of data, and comments to keep the connection alive.
    """
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            if data == b"[DONE]":
                return
            event = json_object(data)
            if event is None:
                shown = data[:_SHOWN].decode(errors="replace")
                raise RequestError(f"the stream holds something that is not a JSON object: {shown!r}")
            yield event
        if len(rest) > MOST_BYTES:
            raise RequestError(f"the stream holds an event of more than {MOST_BYTES >> 20} MiB")
    raise RequestError("the stream ended before its last event")


def json_object(data: str | bytes) -> Body | None:
    """Parse a JSON object; return None for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: lists nested thousands deep
        return None
    return found if isinstance(found, dict) else None


async def _read(response: aiohttp.ClientResponse) -> HttpResponse:
    async with response:
        data = await response.read()
    body = json_object(data)
    if body is None:  # a proxy's page, or an empty body
        text = data[:_SHOWN].decode(errors="replace") or response.reason or "no body"
        body = {"error": {"message": text, "code": response.status}}
    return HttpResponse(response.status, body)


def _message(body: Body) -> str:
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else json.dumps(body)[:_SHOWN]


def _code(body: Body) -> int:
    """Return the status in an error, or 0: the field may also be a word."""
    error = body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 0


def _retry_after(header: str) -> float:
    try:
        return min(max(float(header), 0.1), _MAX_PAUSE_S)
    except ValueError:
        return _PAUSE_S
