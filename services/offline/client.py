"""HTTP to a router: bounded concurrency, patience where waiting helps, an end where it does not.

A router that has no room answers 503 with Retry-After, and one that restarts does not answer: both pass.
A request waits for that; but when nobody has been answered for `PATIENCE_S`, all end with Unavailable.
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

PATIENCE_S = 120.0  # without any answer: a worker's restart with a large model takes a minute and more
MAX_LOST = 3  # connections that broke under one request: it may be the one that breaks them
_CONNECT_S = 10.0
_GRACE_S = 30.0  # the router ends a request that takes too long; this much later we do
_PAUSE_S = 1.0  # where the other side names none
_MAX_PAUSE_S = 30.0
_RETRIED = {429, 503}

T = TypeVar("T")
Body = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """Where requests go."""

    url: str  # http://host:port, without /v1
    api_key: str = ""
    request_timeout_s: float = 600.0  # the router's
    check: Callable[[], None] = field(default=lambda: None)  # raises OfflineError when it is gone for good


@dataclass(frozen=True)
class Answer:
    """An HTTP answer that is final. `body` is what the JSON says, an error object where status is not 200."""

    status: int
    body: Body

    @property
    def ok(self) -> bool:
        return self.status == 200

    def error(self) -> RequestError:
        """What is wrong with the request, as the router put it."""
        return RequestError(_message(self.body), self.status)


class Client:
    """Requests to one endpoint, at most `concurrency` at a time, whoever sends them. Make it in its loop."""

    def __init__(self, endpoint: Endpoint, concurrency: int) -> None:
        self._endpoint = endpoint
        self.concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._session = aiohttp.ClientSession(
            endpoint.url,
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),  # the slots are the limit
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_S, sock_read=endpoint.request_timeout_s + _GRACE_S
            ),
        )
        self._answered = time.monotonic()  # when somebody was last

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """The names that are served. Raises Unavailable, RequestError."""
        async with self._request("GET", "/v1/models", None) as response:
            answer = await _read(response)
        if not answer.ok:
            raise answer.error()
        return [one["id"] for one in answer.body["data"]]

    async def post(self, path: str, body: Body) -> Answer:
        """The whole answer, whatever its status.

        Raises RequestError when no answer can be had for this request, Unavailable or what `Endpoint.check`
        raises when for none.
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
        """The events of a streamed answer. Raises as `post`, and RequestError also for an error's status."""
        async with self._slots, self._request("POST", path, {**body, "stream": True}) as response:
            if response.status != 200:
                raise (await _read(response)).error()
            async for event in _events(response):
                self._answered = time.monotonic()
                if "error" in event:
                    raise RequestError(_message(event), int(event["error"].get("code") or 0))
                yield event

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Body | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is more than "come back later".

        Raises _ConnectionLost when it broke after the request was sent, also within the caller's block.
        """
        began = time.monotonic()
        try:
            response = await self._admitted(method, path, body, began)
            async with response:
                yield response
        except TimeoutError:
            self._endpoint.check()
            raise RequestError(f"no answer after {time.monotonic() - began:.0f} s") from None
        except aiohttp.ClientError as error:
            self._endpoint.check()
            raise _ConnectionLost(str(error) or type(error).__name__) from error

    async def _admitted(
        self, method: str, path: str, body: Body | None, began: float
    ) -> aiohttp.ClientResponse:
        while True:
            try:
                response = await self._session.request(method, path, json=body)
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
                raise Unavailable(f"nothing was answered for {PATIENCE_S:.0f} s: {problem}")
            if time.monotonic() - began > self._endpoint.request_timeout_s:
                raise RequestError(f"others were answered, this one was never admitted: {problem}", 503)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 (so that not all return at once)


class _ConnectionLost(RequestError):
    """It broke after the request was sent: it may have been carried out."""


async def each(items: Iterator[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """Do `work` on every item, on at most `at_once` at a time; an item is taken when there is room for it.

    The first exception ends all and is raised.
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
    """Server-sent events that carry JSON, until [DONE]."""
    rest = b""
    async for chunk in response.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if data:
                yield json.loads(data)
    raise RequestError("the stream ended before the answer did")


async def _read(response: aiohttp.ClientResponse) -> Answer:
    async with response:
        data = await response.read()
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):  # a proxy's page, or an empty one
        text = data[:200].decode(errors="replace") or response.reason or "no body"
        body = {"error": {"message": text, "code": response.status}}
    return Answer(response.status, body)


def _message(body: Body) -> str:
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else json.dumps(body)[:200]


def _retry_after(header: str) -> float:
    try:
        return min(max(float(header), 0.1), _MAX_PAUSE_S)
    except ValueError:
        return _PAUSE_S
