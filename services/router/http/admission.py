"""The router's additions to vLLM's HTTP layer: refusals with a status, deadlines, quotas, classes, usage.

An error before the first byte is an HTTP error, also for a stream.

vLLM's streaming handlers send 200 before they call the engine client, so a refusal could only follow as an
event. Here the response's start waits for the body's first chunk; if the request failed by then, the client
gets its status, OpenAI's error object and Retry-After instead.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from baton.services import logs, trace_context
from baton.services.classes import STANDARD, Classes, ServiceClass
from baton.services.router import classes as choosing
from baton.services.router.access_log import log_without_sequence
from baton.services.router.chronicle import Chronicle
from baton.services.router.errors import NotAllowed, RateLimited, RequestFailed, Unsupported
from baton.services.router.http import usage
from baton.services.router.state import NOBODY, Party, RequestState
from baton.services.router.tenancy import Tenancy, TenantRequest
from baton.services.router.timings import HttpTimes
from baton.services.tenants.model import ANYBODY, Caller
from baton.services.trace_context import TraceContext

CALLER = "baton.caller"  # in a scope: the sender, as its key tells
TIMES = "baton.times"  # in a scope: the exchange's HttpTimes, begun by its connection
TRACE_HEADER = b"traceresponse"  # in a response: its request's trace, as W3C Trace Context names it
TIMEOUT_HEADER = b"x-request-timeout"  # seconds for the whole request, as the client wants it

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Admission:
    """One HTTP request's state, shared by the HTTP layer and the engine client. The first error counts."""

    __slots__ = (
        *("deadline", "error", "http", "options", "party", "request", "response", "service", "states"),
        "trace",
    )

    def __init__(
        self,
        party: Party = NOBODY,
        request: TenantRequest | None = None,
        trace: TraceContext | None = None,
        http: HttpTimes | None = None,
        service: ServiceClass = STANDARD,
    ) -> None:
        self.service = service  # its body may choose another one
        self.party = party  # takes turns with others when its requests wait
        self.trace = trace or trace_context.begin()
        self.http = http or HttpTimes()
        self.response: _HeldResponse | None = None  # while it is sent
        self.request = request  # within its tenant's limits; None for one that came without HTTP
        self.error: RequestFailed | None = None
        self.deadline = math.inf  # time.monotonic, seconds: the client's own
        self.options = usage.UsageOptions()
        self.states: list[RequestState] = []  # of its sequences

    def refuse(self, error: RequestFailed) -> None:
        """Keep the error for the client, if it is the first."""
        if self.error is None:
            self.error = error

    def watch(self, received: float) -> None:
        """Measure the way of the response's next piece, of an output that came to this router `received`."""
        if self.response is not None:
            self.response.watch(received)


# Set for each HTTP request; tasks that handle it inherit it.
current_admission: ContextVar[Admission | None] = ContextVar("baton_admission", default=None)


class AdmissionMiddleware:
    """Pure ASGI middleware. After the first chunk it costs one function call per chunk."""

    def __init__(
        self, app: App, tenancy: Tenancy, chronicle: Chronicle, classes: Classes | None = None
    ) -> None:
        self._app = app
        self._classes = classes or Classes()
        self._tenancy = tenancy
        self._chronicle = chronicle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        caller: Caller = scope.get(CALLER, ANYBODY)
        times: HttpTimes = scope.get(TIMES) or HttpTimes()
        try:
            deadline = _deadline(scope["headers"])
            chosen = choosing.by_header(self._classes, caller, scope["headers"])
            service = chosen or choosing.by_default(self._classes, caller)
            request = await self._tenancy.enter(caller)
        except (Unsupported, NotAllowed, RateLimited) as error:
            log_without_sequence(error.status.value, scope["path"], caller.tenant, error.message)
            for part in error_response(error):
                await send(part)
            return
        times.admitted = time.monotonic()
        trace = self._chronicle.begin(scope["headers"])
        logs.concern(trace_id=trace.trace_id)
        admission = Admission(_party(caller, scope), request, trace, times, service)
        admission.deadline = deadline
        current_admission.set(admission)
        response = admission.response = _HeldResponse(admission, send, self._chronicle)
        try:
            await self._app(scope, self._watched(receive, admission, caller, chosen is not None), response)
        finally:
            request.leave()
            admission.response = None  # it holds the admission
            times.ended = time.monotonic()
            if not admission.states:
                error_text = admission.error.message if admission.error is not None else ""
                log_without_sequence(times.status, scope["path"], caller.tenant, error_text)
            for state in admission.states:
                if state.over:  # otherwise its client has left, and it ends in a moment
                    self._chronicle.over(state)

    def _watched(self, receive: Receive, admission: Admission, caller: Caller, chosen: bool) -> Receive:
        """Return a `receive` that reads the request's own options from its body, once that is complete.

        With `chosen` its class is, and the body chooses none.
        """
        body = bytearray()

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    admission.http.received = admission.http.received or time.monotonic()
                    whole = bytes(body)
                    try:
                        admission.options = usage.options_in(whole)
                        if not chosen and (other := choosing.by_body(self._classes, caller, whole)):
                            admission.service = other
                    except (Unsupported, NotAllowed) as error:
                        admission.refuse(error)
                    body.clear()
            return message

        return watched


def _party(caller: Caller, scope: Scope) -> Party:
    """Return the sender, as one of those that take turns."""
    return Party(caller.tenant, caller.key or _client(scope), caller.settings.priority)


def _client(scope: Scope) -> str:
    """Return an identifier of a sender without a tenant: a digest of its API key, or else its address."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return hashlib.sha256(value).hexdigest()[:16]
    address = scope.get("client")
    return str(address[0]) if address else ""


def _deadline(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """Return the client's own deadline, time.monotonic; inf without one. Raises Unsupported (400)."""
    for name, value in headers:
        if name == TIMEOUT_HEADER:
            try:
                seconds = float(value)
            except ValueError:
                seconds = math.nan
            if not 0 < seconds < math.inf:  # nan is neither
                raise Unsupported(f"{TIMEOUT_HEADER.decode()}: a number of seconds above 0 is needed")
            return time.monotonic() + seconds
    return math.inf


class _HeldResponse:
    """A `send` that holds http.response.start back until the first chunk shows how the request went."""

    __slots__ = ("_admission", "_chronicle", "_send", "_start", "_state", "_watched")

    def __init__(self, admission: Admission, send: Send, chronicle: Chronicle) -> None:
        self._admission = admission
        self._chronicle = chronicle
        self._send = send
        self._start: Message | None = None
        self._state: Send = self._held
        self._watched = 0.0

    def __call__(self, message: Message) -> Awaitable[None]:
        return self._state(message)

    def watch(self, received: float) -> None:
        """Measure the way of the next piece, once: all others are sent without another call."""
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
            return
        admission = self._admission
        if admission.error is not None:
            self._state = self._replaced
            admission.http.status = admission.error.status.value
            for part in error_response(admission.error):
                await self._send(part)
            return
        self._state = self._send
        if self._start is not None:
            self._begin(self._start)
        if admission.options.usage:
            message = self._with_usage(message)
        if self._start is not None:
            await self._send(self._start)
        await self._send(message)
        admission.http.first_byte = time.monotonic()
        if admission.http.streams:
            self._chronicle.first_byte(admission.states)

    def _begin(self, start: Message) -> None:
        """Note what the response's start tells, and name the request's trace in it."""
        http, states = self._admission.http, self._admission.states
        http.status = start["status"]
        for name, value in start["headers"]:
            if name == b"content-type":
                http.streams = value.startswith(b"text/event-stream")
        if states:
            trace = self._admission.trace.traceparent.encode()
            start["headers"] = [*start["headers"], (TRACE_HEADER, trace)]

    def _with_usage(self, message: Message) -> Message:
        """Return the body's first part, a stream's first event or a whole response, with the usage added."""
        if self._admission.http.streams:
            self._state = self._streamed
            return message
        if message.get("more_body", False):
            return message
        body = usage.added_to(message["body"], self._admission.states)
        if self._start is not None:
            length = str(len(body)).encode()
            self._start["headers"] = [
                (name, length if name == b"content-length" else value)
                for name, value in self._start["headers"]
            ]
        return {**message, "body": body}

    async def _streamed(self, message: Message) -> None:
        body = message.get("body", b"")
        await self._send({**message, "body": usage.added_to_event(body, self._admission.states)})

    async def _replaced(self, message: Message) -> None:
        del message  # a part of the response that the client does not get


def error_response(error: RequestFailed) -> tuple[Message, Message]:
    """Return the two ASGI messages of a response in OpenAI's error format."""
    kind = error.kind or "".join(word.capitalize() for word in error.status.phrase.split()) + "Error"
    code: str | int = error.code or error.status.value
    fields = {"message": error.message, "type": kind, "param": error.param, "code": code}
    body = json.dumps({"error": fields}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status is HTTPStatus.SERVICE_UNAVAILABLE or error.retry_after_s:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if error.final:
        headers.append((b"x-should-retry", b"false"))
    start = {"type": "http.response.start", "status": error.status.value, "headers": headers}
    return start, {"type": "http.response.body", "body": body, "more_body": False}
