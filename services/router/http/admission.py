"""The router's additions to vLLM's HTTP layer: refusals with a status, deadlines, quotas, classes, usage.

An error before the first byte is an HTTP error, also for a stream.

vLLM's streaming handlers send 200 before they call the engine client, so a refusal could only follow as an
event. Here the response's start waits for the body's first chunk; if the request failed by then, the client
gets its status, OpenAI's error object and Retry-After instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Iterable
from contextvars import ContextVar

from baton.services import logs, trace_context
from baton.services.classes import STANDARD, Classes, ServiceClass
from baton.services.router.chronicle import Chronicle, log_without_sequence
from baton.services.router.errors import NotAllowed, RateLimited, RequestFailed, Unsupported
from baton.services.router.fields import NOTHING, Own, by_body, by_default, by_header, own_fields
from baton.services.router.http import presented, streaming, usage
from baton.services.router.http.body import again, read
from baton.services.router.http.forms import App, Message, Receive, Scope, Send, error_response
from baton.services.router.state import NOBODY, Party, RequestState
from baton.services.router.tenancy import Tenancy, TenantRequest
from baton.services.router.timings import HttpTimes
from baton.services.tenants.model import ANYBODY, Caller
from baton.services.trace_context import TraceContext

CALLER = "baton.caller"  # scope key: the sender, known by its API key
TIMES = "baton.times"  # scope key: the exchange's HttpTimes, begun by its connection
TRACE_HEADER = b"traceresponse"  # a response's header for its trace (W3C Trace Context)
TIMEOUT_HEADER = b"x-request-timeout"  # seconds that the client allows for the whole request


class Admission:
    """One HTTP request's state, shared by the HTTP layer and the engine client. The first error counts."""

    __slots__ = (
        *("deadline", "error", "http", "lasting", "options", "own", "party", "request", "response"),
        *("service", "states", "trace"),
    )

    def __init__(
        self,
        party: Party = NOBODY,
        request: TenantRequest | None = None,
        trace: TraceContext | None = None,
        http: HttpTimes | None = None,
        service: ServiceClass = STANDARD,
    ) -> None:
        self.service = service  # until the body chooses another class
        self.party = party  # takes turns with others when its requests wait
        self.trace = trace or trace_context.begin()
        self.http = http or HttpTimes()
        self.response: _HeldResponse | None = None  # while it is sent
        self.request = request  # the tenant's admission; None for a request without HTTP
        self.error: RequestFailed | None = None
        self.deadline = math.inf  # time.monotonic, seconds: the client's own
        self.own: Own = NOTHING  # the router's own fields of its body
        self.options = usage.UsageOptions()
        self.states: list[RequestState] = []  # one per sequence
        self.lasting: asyncio.Task[None] | None = None  # continues after its response

    def refuse(self, error: RequestFailed) -> None:
        """Keep the error for the client, if it is the first."""
        if self.error is None:
            self.error = error

    def watch(self, received: float) -> None:
        """Measure the next piece's way to the client, of an output that arrived at `received`."""
        if self.response is not None:
            self.response.watch(received)


# Set for each HTTP request; tasks that handle it inherit it.
current_admission: ContextVar[Admission | None] = ContextVar("baton_admission", default=None)


class AdmissionMiddleware:
    """Pure ASGI middleware. After the first chunk it costs one function call per chunk."""

    def __init__(
        self,
        app: App,
        tenancy: Tenancy,
        chronicle: Chronicle,
        classes: Classes | None = None,
        comment_s: float = 0.0,
    ) -> None:
        """Add comments to streams that are silent for `comment_s` seconds; 0: no comments."""
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
            for part in error_response(error):
                await send(part)
            return
        times.admitted = time.monotonic()
        trace = self._chronicle.begin(scope["headers"])
        logs.concern(trace_id=trace.trace_id)
        admission = Admission(_party(caller, scope), request, trace, times, service)
        admission.deadline = deadline
        current_admission.set(admission)
        comments = streaming.Comments(send, self._comment_s)
        response = admission.response = _HeldResponse(admission, comments, self._chronicle)
        try:
            body = await self._body(receive, admission, caller, chosen is not None)
            if admission.error is not None:
                for part in error_response(admission.error):
                    await response(part)
            elif body is not None:
                await self._app(scope, again(body, receive), response)
        finally:
            comments.end()
            if admission.lasting is not None:
                admission.lasting.add_done_callback(lambda _: request.leave())
            else:
                request.leave()
            admission.response = None  # it holds the admission
            times.ended = time.monotonic()
            if not admission.states:
                error_text = admission.error.message if admission.error is not None else ""
                log_without_sequence(times.status, scope["path"], caller.tenant, error_text)
            for state in admission.states:
                if state.over:  # otherwise its client has left, and it ends in a moment
                    self._chronicle.over(state)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what needs no admission: other methods, and the server's own messages."""
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
        """Read the body and the options in it; return None if the client leaves or the request is refused.

        With `chosen`, the request's class is chosen already, and the body does not choose.
        """
        try:
            body = await read(receive)
            if body is None:
                return None
            own = admission.own = own_fields(body)
            admission.options = usage.options_in(own)
            if not chosen and (other := by_body(self._classes, caller, own)):
                admission.service = other
        except RequestFailed as error:
            admission.refuse(error)
            return None
        finally:
            admission.http.received = admission.http.received or time.monotonic()
        return body


def _party(caller: Caller, scope: Scope) -> Party:
    """Return the sender as a party that takes turns."""
    return Party(caller.tenant, caller.key or _client(scope), caller.settings.priority)


def _client(scope: Scope) -> str:
    """Return an identifier of a sender without a tenant: a digest of its API key, or else its address."""
    for key in presented.keys_in(scope["headers"]):
        return hashlib.sha256(key).hexdigest()[:16]
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
        """Measure the next piece alone: all others are sent without another call."""
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
            for part in error_response(admission.error):
                await self._send(part)
            return
        if self._start is not None:
            self._begin(self._start)
        await self._first(message)

    async def _begun(self) -> bool:
        """Begin a stream for a comment, before its first piece; return False if it has failed."""
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
        if admission.options.usage:
            message = self._with_usage(message)
        if self._start is not None:
            await self._send(self._start)
        await self._send(message)
        admission.http.first_byte = time.monotonic()
        if admission.http.streams:
            self._chronicle.first_byte(admission.states)

    def _begin(self, start: Message) -> None:
        """Note the response's status and kind, and add the request's trace to its headers."""
        http, states = self._admission.http, self._admission.states
        http.status = start["status"]
        if streaming.streams(start):
            http.streams = True
            streaming.mark(start)
        if states:
            trace = self._admission.trace.traceparent.encode()
            start["headers"] = [*start["headers"], (TRACE_HEADER, trace)]

    def _with_usage(self, message: Message) -> Message:
        """Add the usage to a whole response; for a stream, to the events that follow this one."""
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
