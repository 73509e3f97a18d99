"""The router's additions to vLLM's HTTP layer: refusals with a status, deadlines, quotas, classes, usage.

vLLM's streaming handlers send 200 before they call the engine client. Here the response's start is held until
the body's first chunk; if the request has failed by then, the client gets the error's status instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.services import logs, trace_context
from baton.services.classes import STANDARD, Classes, ServiceClass
from baton.services.router.chronicle import Chronicle, log_without_sequence
from baton.services.router.errors import NotAllowed, RateLimited, RequestFailed, Unsupported
from baton.services.router.fields import NOTHING, Own, by_body, by_default, by_header, own_fields
from baton.services.router.http import streaming
from baton.services.router.http.authentication import CALLER, keys_in
from baton.services.router.http.body import again, read
from baton.services.router.http.forms import send_error
from baton.services.router.media.door import Images
from baton.services.router.record import usage_of
from baton.services.router.state import NOBODY, Party, RequestState
from baton.services.router.tenancy import Tenancy, TenantRequest
from baton.services.router.timings import HttpTimes
from baton.services.tenants.model import ANYBODY, Caller
from baton.services.trace_context import TraceContext

TIMES = "baton.times"  # scope key: the request's HttpTimes, set by its connection
TRACE_HEADER = b"traceresponse"  # response header: the trace (W3C Trace Context)
TIMEOUT_HEADER = b"x-request-timeout"  # request header: seconds allowed for the whole request


@dataclass(slots=True, eq=False)
class Admission:
    """One HTTP request's state, shared by the HTTP layer and the engine client."""

    party: Party = NOBODY  # waiting requests are served in turn by party
    request: TenantRequest | None = None  # the tenant's admission; None without HTTP
    trace: TraceContext = field(default_factory=trace_context.begin)
    http: HttpTimes = field(default_factory=HttpTimes)
    service: ServiceClass = STANDARD  # the body may choose another class
    deadline: float = math.inf  # time.monotonic; set by the client
    response: _HeldResponse | None = None  # while it is being sent
    error: RequestFailed | None = None
    images: Images | None = None  # the admitted images, until they are rendered; None: not looked for yet
    own: Own = NOTHING  # the router's own fields in the body
    wants_usage: bool = False
    states: list[RequestState] = field(default_factory=list)  # one per sequence
    lasting: asyncio.Task[None] | None = None  # a background task that outlives the response

    def refuse(self, error: RequestFailed) -> None:
        """Store the error for the client, unless there is one already.

        Drops the traceback: it refers to this object and to everything that the request held, and both would
        stay in memory until the next garbage collection.
        """
        error.__traceback__ = error.__context__ = None
        if self.error is None:
            self.error = error

    def watch(self, received: float) -> None:
        """Measure how long the next chunk takes to reach the client, from `received` on."""
        if self.response is not None:
            self.response.watch(received)


# Set for each HTTP request, and inherited by the tasks that handle it.
current_admission: ContextVar[Admission | None] = ContextVar("baton_admission", default=None)


class AdmissionMiddleware:
    """Admits POST requests. Pure ASGI: after the first chunk it costs one function call per chunk."""

    def __init__(
        self,
        app: ASGIApp,
        tenancy: Tenancy,
        chronicle: Chronicle,
        classes: Classes | None = None,
        comment_s: float = 0.0,
    ) -> None:
        """Send comments on streams that are silent for `comment_s` seconds; 0: never."""
        self._app = app
        self._comment_s = comment_s
        self._classes = classes or Classes()
        self._tenancy = tenancy
        self._chronicle = chronicle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._pass(scope, receive, send)
            return
        caller: Caller = scope.get(CALLER, ANYBODY)
        times: HttpTimes = scope.get(TIMES) or HttpTimes()
        try:
            deadline = _deadline(scope["headers"])
            chosen = by_header(self._classes, caller, scope["headers"])
            service = chosen or by_default(self._classes, caller)
            request = await self._tenancy.enter(caller)
        except (Unsupported, NotAllowed, RateLimited) as error:
            log_without_sequence(error.status.value, scope["path"], caller.tenant, error.message)
            await send_error(send, error)
            return
        times.admitted = time.monotonic()
        trace = self._chronicle.begin(scope["headers"])
        logs.concern(trace_id=trace.trace_id)
        admission = Admission(_party(caller, scope), request, trace, times, service, deadline)
        current_admission.set(admission)
        comments = streaming.Comments(send, self._comment_s)
        response = admission.response = _HeldResponse(admission, comments, self._chronicle)
        try:
            body = await self._body(receive, admission, caller, chosen is not None)
            if admission.error is not None:
                await send_error(response, admission.error)
            elif body is not None:
                await self._app(scope, again(body, receive), response)
        finally:
            comments.end()
            if admission.lasting is not None:
                admission.lasting.add_done_callback(lambda _: request.leave())
            else:
                request.leave()
            admission.response = None  # breaks a reference cycle
            times.ended = time.monotonic()
            if not admission.states:
                error_text = admission.error.message if admission.error is not None else ""
                log_without_sequence(times.status, scope["path"], caller.tenant, error_text)
            for state in admission.states:
                if state.over:  # otherwise the client has left, and the sequence is recorded when it ends
                    self._chronicle.over(state)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle other methods and scopes that are not HTTP, which need no admission."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        comments = streaming.passing(send, self._comment_s)
        try:
            await self._app(scope, receive, comments.send)
        finally:
            comments.end()

    async def _body(
        self, receive: Receive, admission: Admission, caller: Caller, chosen: bool
    ) -> bytes | None:
        """Read the body and its options; return None if the client left or the request is refused.

        `chosen`: a header has chosen the class, so the body may not.
        """
        try:
            body = await read(receive)
            if body is None:
                return None
            own = admission.own = own_fields(body)
            admission.wants_usage = usage_wanted(own)
            if not chosen and (other := by_body(self._classes, caller, own)):
                admission.service = other
        except RequestFailed as error:
            admission.refuse(error)
            return None
        finally:
            admission.http.received = admission.http.received or time.monotonic()
        return body


def _party(caller: Caller, scope: Scope) -> Party:
    return Party(caller.tenant, caller.key or _client(scope), caller.settings.priority)


def _client(scope: Scope) -> str:
    """Identify a sender without a tenant by a digest of its API key, or by its address."""
    for key in keys_in(scope["headers"]):
        return hashlib.sha256(key).hexdigest()[:16]
    address = scope.get("client")
    return str(address[0]) if address else ""


def _deadline(headers: Iterable[tuple[bytes, bytes]]) -> float:
    for name, value in headers:
        if name == TIMEOUT_HEADER:
            try:
                seconds = float(value)
            except ValueError:
                seconds = math.nan
            if not 0 < seconds < math.inf:  # false for nan
                raise Unsupported(f"{TIMEOUT_HEADER.decode()}: a number of seconds above 0 is needed")
            return time.monotonic() + seconds
    return math.inf


class _HeldResponse:
    """A `send` that holds back http.response.start until the first chunk or an error."""

    __slots__ = ("_admission", "_chronicle", "_comments", "_send", "_start", "_state", "_watched")

    def __init__(self, admission: Admission, comments: streaming.Comments, chronicle: Chronicle) -> None:
        self._admission = admission
        self._chronicle = chronicle
        self._comments = comments
        self._send = comments.sender
        self._start: Message | None = None
        self._state: Send = self._held
        self._watched = 0.0

    def __call__(self, message: Message) -> Awaitable[None]:
        return self._state(message)

    def watch(self, received: float) -> None:
        """Measure the next chunk only: all other chunks are sent without an extra call."""
        if self._state == self._send:
            self._watched = received
            self._state = self._measured

    async def _measured(self, message: Message) -> None:
        self._state = self._send
        began = time.monotonic()
        await self._send(message)
        self._chronicle.sent(began - self._watched, time.monotonic() - began)

    async def _held(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            if streaming.streams(message):
                self._comments.begin(self._begun)
            return
        admission = self._admission
        if admission.error is not None:
            self._state = self._replaced
            admission.http.status = admission.error.status.value
            await send_error(self._send, admission.error)
            return
        if self._start is not None:
            self._begin(self._start)
        await self._first(message)

    async def _begun(self) -> bool:
        """Start the stream early, for a comment; return False if the request has failed."""
        if self._state == self._held:
            if self._start is None or self._admission.error is not None:
                return False
            self._state = self._first
            self._begin(self._start)
            start, self._start = self._start, None
            await self._comments.pass_on(start)
        return True

    async def _first(self, message: Message) -> None:
        admission = self._admission
        self._state = self._send
        if admission.wants_usage:
            message = self._with_usage(message)
        if self._start is not None:
            await self._send(self._start)
        await self._send(message)
        admission.http.first_byte = time.monotonic()
        if admission.http.streams:
            self._chronicle.first_byte(admission.states)

    def _begin(self, start: Message) -> None:
        http, states = self._admission.http, self._admission.states
        http.status = start["status"]
        if streaming.streams(start):
            http.streams = True
            streaming.mark(start)
        if states:
            trace = self._admission.trace.traceparent.encode()
            start["headers"] = [*start["headers"], (TRACE_HEADER, trace)]

    def _with_usage(self, message: Message) -> Message:
        """Add the usage to a whole response; a stream's later events get it instead."""
        if self._admission.http.streams:
            self._state = self._streamed
            return message
        if message.get("more_body", False):
            return message
        body = with_usage(message["body"], self._admission.states)
        if self._start is not None:
            length = str(len(body)).encode()
            self._start["headers"] = [
                (name, length if name == b"content-length" else value)
                for name, value in self._start["headers"]
            ]
        return {**message, "body": body}

    async def _streamed(self, message: Message) -> None:
        body = message.get("body", b"")
        await self._send({**message, "body": with_usage_in_event(body, self._admission.states)})

    async def _replaced(self, message: Message) -> None:
        del message  # our error has replaced the response


FIELD = "baton"
_LAST_CHUNK = b'"choices":[]'
_EVENT = b"data: "


def usage_wanted(own: Own) -> bool:
    """Return whether a request asks for its usage. Raises Unsupported (400)."""
    if own.baton is msgspec.UNSET or own.baton == {}:
        return False
    match own.baton:
        case {"usage": bool(usage), **others} if not others:
            return usage
    raise Unsupported(f'{FIELD}: {{"usage": true}} or {{"usage": false}} is needed')


def with_usage(body: bytes, states: list[RequestState]) -> bytes:
    """Add `usage.baton` to a whole response. Any other body, such as an error, is returned unchanged."""
    try:
        response = json.loads(body)
    except ValueError:
        return body
    return _dump(response) if _add(response, states) else body


def with_usage_in_event(body: bytes, states: list[RequestState]) -> bytes:
    """Add `usage.baton` to the last chunk, which has the usage, if it is in this piece of a stream."""
    if _LAST_CHUNK not in body:
        return body
    events = body.split(b"\n\n")
    for index, event in enumerate(events):
        if event.startswith(_EVENT) and _LAST_CHUNK in event:
            chunk = json.loads(event.removeprefix(_EVENT))
            if _add(chunk, states):
                events[index] = _EVENT + _dump(chunk)
    return b"\n\n".join(events)


def _add(response: Any, states: list[RequestState]) -> bool:
    usage = response.get("usage") if isinstance(response, dict) else None
    if not isinstance(usage, dict) or not states:
        return False
    usage[FIELD] = usage_of(states)
    return True


def _dump(response: Any) -> bytes:
    return json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
