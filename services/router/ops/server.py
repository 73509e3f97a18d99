"""The live page's own HTTP server, in the router's event loop but on its own port.

GET  /ops                    the page
GET  /ops/first              data needed once: column names, the last quarter of an hour
GET  /ops/feed               a message per tick, as server-sent events
GET  /ops/requests           ?order=last|slowest &n= &search=
GET  /ops/requests/{id}      one request, by its id in logs or its response id
POST /ops/actions            drain, undrain, role
POST /ops/login              exchanges the key for a cookie
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from importlib.resources import files
from itertools import islice
from typing import Annotated, Any, Literal, cast
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.keeping import keep
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.errors import ServiceError
from baton.services.overview.commands import ActionRefused, Kind, act
from baton.services.overview.workers import INFO, WARNING
from baton.services.router.chronicle import LAST, Recent
from baton.services.router.http.connections import Connections
from baton.services.router.http.limits import HttpLimits
from baton.services.router.ops.access import COOKIE, PageAccess
from baton.services.router.ops.feed import MOST_WATCHERS, Events, Feed, TooManyWatchers
from baton.tasks import spawn

log = logging.getLogger("baton.audit")


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid")

    action: Kind
    worker: str = Field(min_length=1, max_length=200)
    confirm: str  # repeats `worker`
    role: str = ""


class Actions:
    """Carries out actions through the scheduler that lists the worker."""

    def __init__(self, schedulers: Sequence[SchedulerClient], events: Events, forbidden: str = "") -> None:
        """Act on `schedulers`, one per model. `forbidden` says why this router may not act; "" if it may."""
        self._schedulers = schedulers
        self._events = events
        self.forbidden = forbidden

    async def run(self, action: Action, caller: str) -> str:
        """Carry out an action and return a description of it. Raises ActionRefused."""
        if self.forbidden:
            raise ActionRefused(self.forbidden)
        if action.confirm != action.worker:
            raise ActionRefused(
                f"not confirmed: the action is for {action.worker!r}, the confirmation for {action.confirm!r}"
            )
        try:
            done = await self._first(action)
        except (SchedulerError, ServiceError) as error:
            log.warning("%s asked to %s %s: refused: %s", caller, action.action, action.worker, error)
            self._events.add(WARNING, f"{action.action} {action.worker}: refused: {error}")
            raise ActionRefused(str(error)) from None
        log.warning("%s: %s", caller, done)
        self._events.add(INFO, f"{done} (asked by {caller})")
        return done

    async def _first(self, action: Action) -> str:
        """Call the scheduler that lists the worker; if none does, call each until one knows its name.

        Raises the error of the last call.
        """
        has = [
            one
            for one in self._schedulers
            if any(worker.identity.worker_id == action.worker for worker in one.standby.workers)
        ]
        *others, last = has or self._schedulers
        for scheduler in others:
            with contextlib.suppress(SchedulerError, ActionRefused):
                return await act(scheduler, action.action, action.worker, action.role)
        return await act(last, action.action, action.worker, action.role)


STOP_S = 2.0  # time for open pages to close when the router ends
MOST_BODY = 64 << 10  # bytes: a key, or an action
MOST_CONNECTIONS = 4 * MOST_WATCHERS  # a browser opens up to six
SLOW_CLIENT_S = 10.0
KEEP_ALIVE_S = 30.0
_FORM = "application/x-www-form-urlencoded"
_STATIC = files(__package__) / "static"
# The page loads nothing from elsewhere, and no other page may frame it.
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_OPEN = ("/ops/login", "/ops/static/")


def build_app(feed: Feed, recent: Recent, actions: Actions, access: PageAccess) -> FastAPI:
    app = FastAPI(title="Baton live page", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, access=access)

    @app.get("/")
    async def root() -> Response:
        return RedirectResponse("/ops")

    for path, name in (("/ops", "index.html"), ("/ops/login", "login.html")):
        app.add_api_route(path, partial(_page, name), response_class=HTMLResponse)

    @app.post("/ops/login")
    async def login(request: Request) -> Response:
        return await _login(request, access)

    @app.get("/ops/first")
    async def first() -> Response:
        return Response(feed.first(), media_type="application/json")

    @app.get("/ops/feed", response_class=EventSourceResponse)
    async def watch() -> AsyncIterator[ServerSentEvent]:
        try:
            async for message in feed.watch():
                yield ServerSentEvent(raw_data=message.decode())
        except TooManyWatchers:
            yield ServerSentEvent(event="full", raw_data="too many pages are open", retry=10_000)

    @app.get("/ops/requests")
    async def requests(
        order: Literal["last", "slowest"] = "last",
        n: Annotated[int, Query(ge=1, le=LAST)] = 50,
        search: Annotated[str, Query(max_length=200)] = "",
    ) -> list[dict[str, Any]]:
        found = recent.last() if order == "last" else recent.slowest()
        rows = (record.to_json() for record in found)
        return list(islice((row for row in rows if _matches(row, search)), n))  # stops once there are n

    @app.get("/ops/requests/{request_id}")
    async def request(request_id: str) -> dict[str, Any]:
        record = recent.find(request_id)
        if record is None:
            raise HTTPException(404, f"request {request_id!r} is not among the recent ones")
        return record.to_json()

    @app.post("/ops/actions")
    async def act(request: Request, action: Action) -> Response:
        if not access.may_act(request.headers.raw):
            return _problem(403, "actions must come from the page itself, with the header X-Baton-Ops")
        caller = request.client.host if request.client else "an unknown client"
        try:
            return JSONResponse({"done": await actions.run(action, caller)})
        except ActionRefused as error:
            return _problem(409, str(error))

    app.mount("/ops/static", StaticFiles(directory=str(_STATIC)), name="static")
    return app


async def _page(name: str) -> str:
    return (_STATIC / name).read_text()


async def _login(request: Request, access: PageAccess) -> Response:
    # Starlette would write a multipart form to a file as it arrives.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        return _problem(415, f"send the key in a form: Content-Type: {_FORM}")
    try:
        key = parse_qs(await request.body(), max_num_fields=10).get(b"key", [b""])[0]
    except ValueError:
        return _problem(400, "the form has too many fields: send only 'key'")
    if wait_s := access.wait_s(_host(request.scope), key):
        return _too_often(wait_s)
    if not access.fits(key):
        return RedirectResponse("/ops/login?wrong", status_code=303)
    response = RedirectResponse("/ops", status_code=303)
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, access.cookie(), httponly=True, samesite="strict", secure=secure)
    return response


class Guard:
    """Refuses requests that may not see the page, and adds security headers to responses.

    Pure ASGI: Starlette's BaseHTTPMiddleware hides why a response broke off.
    """

    def __init__(self, app: ASGIApp, access: PageAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        access, path = self._access, scope["path"]
        given = access.shown(scope["headers"])
        if given and (wait_s := access.wait_s(_host(scope), *given)):
            await _too_often(wait_s)(scope, receive, send)
            return
        if not access.opens(scope["headers"]) and not (access.has_key and path.startswith(_OPEN)):
            await _closed(access, path)(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if path.startswith("/ops/static/"):
                    headers["cache-control"] = (
                        "no-cache"  # revalidated each time, sent only if it has changed
                    )
            await send(message)

        await self._app(scope, receive, send_with_headers)


@contextlib.asynccontextmanager
async def serving(app: FastAPI, feed: Feed, sock: socket.socket) -> AsyncIterator[None]:
    """Serve on `sock`, and run the feed, inside the block."""

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the router handles signals

    limits = HttpLimits(MOST_BODY, MOST_CONNECTIONS, SLOW_CLIENT_S, KEEP_ALIVE_S, of_router=False)
    config = uvicorn.Config(
        app,
        http=cast(Any, Connections(limits, lambda _: None)),  # typed as a class, but uvicorn only calls it
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = Server(config)
    tasks = [spawn(server.serve([sock]), "the live page"), keep(feed.run, "the live page's feed")]
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        tasks[1].cancel()
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), STOP_S)


def _closed(access: PageAccess, path: str) -> Response:
    if not access.has_key:
        return _problem(421, "without ops.key this page answers only to localhost, 127.0.0.1 and [::1]")
    if path == "/ops":
        return RedirectResponse("/ops/login", status_code=303)
    return _problem(
        401,
        "the page's key (ops.key) is needed: send it as 'Authorization: Bearer KEY', or log in at /ops/login",
    )


def _problem(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)


def _too_often(wait_s: float) -> Response:
    seconds = str(math.ceil(wait_s))
    response = _problem(429, f"too many wrong keys came from this address: try again in {seconds} s")
    response.headers["retry-after"] = seconds
    return response


def _host(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""


def _matches(row: dict[str, Any], search: str) -> bool:
    if not search:
        return True
    workers = [one[side] for one in row["attempts"] for side in ("prefill_worker", "decode_worker")]
    values = (row["request_id"], row["response_id"], row["trace_id"], row["tenant"], row["outcome"], *workers)
    return any(search in value for value in values)
