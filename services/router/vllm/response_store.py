"""Store Responses (VLLM_ENABLE_RESPONSES_API_STORE=1) within limits, and serve each to its own tenant.

vLLM keeps Responses forever, for anyone who knows an id. Here each id, chosen by the router, belongs to a
tenant. When there is no room, the tenant that uses the most loses its oldest answers. Requests that need the
store are refused without it, and while another router serves the same models: an answer could be in either.

Leans on: vllm.entrypoints.openai.responses.serving.OpenAIServingResponses (enable_store, response_store,
msg_store, event_store, background_tasks, create_responses, _run_background_request,
_run_background_request_stream, responses_background_stream_generator, _make_not_found_error),
vllm.entrypoints.openai.responses.api_router._convert_stream_to_sse_events, the fields of ResponsesRequest,
and that stored objects have an id, a status and model_dump_json.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError

from baton.keeping import keep
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.engine.isolation import RESPONSES_STORE
from baton.services.errors import StartError
from baton.services.router.errors import NoSuchResponse, Overloaded, RequestFailed, Unsupported
from baton.services.router.http.admission import current_admission
from baton.services.router.http.authentication import CALLER
from baton.services.router.http.forms import as_response
from baton.services.router.vllm.endings import ENDS, failure
from baton.services.router.vllm.engine_client import RefusedByRouter, refusal
from baton.services.tenants.model import ANYBODY
from baton.tasks import stop

log = logging.getLogger(__name__)

MOST = 1000  # answers stored in a router
MOST_BYTES = 64 << 20
AGE_S = 3600.0
EVENT_BYTES = 1 << 10  # estimate per stored event of a background answer's stream
ALIVE_S = 3.0  # routers call a scheduler every second; a router that is silent for longer has ended
START_S = 6.0  # time for a predecessor to end
LOOK_S = 2.0  # between two checks for other routers
_PATH = "/v1/responses/{response_id}"
NOT_KEPT = (
    "responses are not stored here: send the conversation itself as 'input' (one router stores them with "
    "VLLM_ENABLE_RESPONSES_API_STORE=1: docs/frontend.md)"
)

Answer = Callable[[Request, Any, str], Awaitable[Response]]


@dataclass
class Kept:
    """An answer that is stored or will be."""

    tenant: str
    handler: Any  # the handler of the answer's model
    at: float  # time.monotonic
    size: int = 0  # bytes


class ResponseStore:
    """The stored answers of all models of a router. For its event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept: dict[str, Kept] = {}  # keyed by id, oldest first
        self._clock = clock
        self.on = False
        self.elsewhere = ""  # another router of the deployment, which may have the answers

    def adopt(self, handler: Any) -> None:
        """Make a model's Responses handler use this store. `handler`: None if there is none."""
        if handler is None:
            return
        self.on = self.on or handler.enable_store
        handler.create_responses = partial(self._create, handler, handler.create_responses)
        for name in ("_run_background_request", "_run_background_request_stream"):
            setattr(handler, name, partial(self._run, handler, getattr(handler, name)))
        handler.responses_background_stream_generator = partial(_following, handler)
        handler.response_store = _Measured(self._measure)
        handler.msg_store = _Measured(self._measure)

    def find(self, response_id: str, tenant: str) -> Any:
        """Return the handler of a tenant's answer; None if it was dropped or belongs to another tenant."""
        self._forget_old()
        kept = self._kept.get(response_id)
        return kept.handler if kept is not None and kept.tenant == tenant else None

    def delete(self, response_id: str) -> None:
        kept = self._kept.pop(response_id, None)
        if kept is None:
            return
        if task := kept.handler.background_tasks.get(response_id):
            task.cancel()
        for store in (kept.handler.response_store, kept.handler.msg_store, kept.handler.event_store):
            store.pop(response_id, None)

    def problem(self) -> RequestFailed | None:
        """Return why the store cannot be used, or None."""
        if not self.on:
            return Unsupported(NOT_KEPT)
        if self.elsewhere:
            return Overloaded(
                f"responses are stored in one router's memory, and {self.elsewhere} serves the same model: "
                "run one router, or send the conversation itself as 'input'"
            )
        return None

    @property
    def size(self) -> int:
        return sum(one.size for one in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    async def _create(
        self, handler: Any, create: Callable[..., Awaitable[Any]], request: Any, raw_request: Any = None
    ) -> Any:
        tenant = tenant_of(raw_request)
        needs = _needs(request)
        if needs and (problem := self.problem()):
            raise refusal(type(problem)(f"{needs}: {problem.message}"))
        previous = request.previous_response_id
        if previous is not None and self.find(previous, tenant) is not handler:
            return handler._make_not_found_error(previous)
        if previous is not None and _runs(handler.response_store.get(previous)):
            raise refusal(Unsupported("previous_response_id: that response is not complete yet"))
        if not self.on or self.elsewhere or not request.store:
            request.store = False
            return await create(request, raw_request)
        request.request_id = f"resp_{uuid.uuid4().hex}"
        self._claim(request.request_id, Kept(tenant, handler, self._clock()))
        answer = None
        try:
            answer = await create(request, raw_request)
        finally:
            if answer is None or isinstance(answer, ErrorResponse):
                self.delete(request.request_id)
        self._hold_on(request.request_id, handler)
        return answer

    async def _run(
        self, handler: Any, run: Callable[..., Awaitable[None]], request: Any, *args: Any, **kwargs: Any
    ) -> None:
        response_id = request.request_id
        _note(handler, response_id, "in_progress")
        try:
            await run(request, *args, **kwargs)
        except Exception as error:  # the client sees the error in the stored answer
            if response_id not in self._kept:
                return  # the answer was deleted, which cancelled this task
            if not isinstance(error, RefusedByRouter):
                log.exception("a response in the background has failed")
                error = GenerationError("the response failed in the router")
            _note(handler, response_id, "failed", failure(error))
        events, _ = handler.event_store.get(response_id, ((), None))
        self._measure(response_id, len(events) * EVENT_BYTES)
        if events and events[-1].type == "response.failed":
            _note(handler, response_id, "failed", events[-1].response["error"])

    def _claim(self, response_id: str, kept: Kept) -> None:
        self._kept[response_id] = kept
        self._forget_old()
        self._make_room()

    def _hold_on(self, response_id: str, handler: Any) -> None:
        """Count a background task as one of its tenant's running requests until it ends."""
        task = handler.background_tasks.get(response_id)
        admission = current_admission.get()
        if task is not None and admission is not None:
            admission.lasting = task

    def _measure(self, response_id: str, added: int) -> bool:
        kept = self._kept.get(response_id)
        if kept is None:
            return False
        kept.size += added
        self._make_room()
        return response_id in self._kept

    def _forget_old(self) -> None:
        before = self._clock() - AGE_S
        for response_id, kept in list(self._kept.items()):
            if kept.at > before:
                return
            self.delete(response_id)

    def _make_room(self) -> None:
        size = self.size
        while len(self._kept) > MOST or size > MOST_BYTES:
            held: Counter[str] = Counter()
            for one in self._kept.values():
                held[one.tenant] += one.size if size > MOST_BYTES else 1
            most = held.most_common(1)[0][0]
            oldest = next(key for key, one in self._kept.items() if one.tenant == most)
            size -= self._kept[oldest].size
            self.delete(oldest)


@contextlib.asynccontextmanager
async def kept_alone(
    store: ResponseStore, schedulers: Sequence[SchedulerClient], router_id: str
) -> AsyncIterator[None]:
    """Inside the block, keep the store closed while another router of these models is running.

    A router refuses to start while another is running (StartError). If both start at once, or while no
    scheduler answers, each closes its store when the scheduler reports the other router.
    """
    if not store.on:
        yield
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_S
    while other := await _another(schedulers, router_id):
        if loop.time() > deadline:
            raise StartError(
                f"the environment variable {RESPONSES_STORE} is set, and {other} serves the same model: "
                "responses are stored in one router's memory; run one router, or unset the variable"
            )
        await asyncio.sleep(LOOK_S / 4)
    watching = keep(
        partial(_watch, store, schedulers, router_id), "other routers, for the store of responses"
    )
    try:
        yield
    finally:
        await stop(watching)


async def _watch(store: ResponseStore, schedulers: Sequence[SchedulerClient], router_id: str) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        other = await _another(schedulers, router_id)
        if other is not None and other != store.elsewhere:
            if other:
                log.error("%s serves the same model: the store of responses is closed until it ends", other)
            store.elsewhere = other


async def _another(schedulers: Sequence[SchedulerClient], router_id: str) -> str | None:
    """Return the id of another router; "" if there is none, None if no scheduler answers."""
    for scheduler in schedulers:
        try:
            description = await scheduler.describe()
        except SchedulerError:
            return None
        for one in description.routers:
            if one.router_id != router_id and one.heard_age_s < ALIVE_S:
                return str(one.router_id)
    return ""


class _Measured(dict[str, Any]):
    """One of the handler's dictionaries, which reports sizes and stores only what the store accepts."""

    def __init__(self, measure: Callable[[str, int], bool]) -> None:
        super().__init__()
        self._measure = measure
        self._sizes: dict[str, int] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        size = len(value.model_dump_json()) if hasattr(value, "model_dump_json") else len(repr(value))
        if self._measure(key, size - self._sizes.get(key, 0)):
            self._sizes[key] = size
            super().__setitem__(key, value)

    def pop(self, key: str, default: Any = None) -> Any:
        self._sizes.pop(key, None)
        return super().pop(key, default)


def tenant_of(raw_request: Any) -> str:
    """Return the tenant that sent a request, or ""."""
    return raw_request.scope.get(CALLER, ANYBODY).tenant if raw_request is not None else ""


def _needs(request: Any) -> str:
    """Return the field of a request that needs stored answers, or "".

    `store` does not count: clients send true by default. Raises a refusal for `conversation`.
    """
    if (request.model_extra or {}).get("conversation") is not None:
        raise refusal(Unsupported("conversation: conversations are not stored here; send it as 'input'"))
    if request.previous_response_id is not None:
        return "previous_response_id"
    return "background" if request.background else ""


def _runs(stored: Any) -> bool:
    return stored is not None and stored.status in ("queued", "in_progress")


def _note(handler: Any, response_id: str, status: str, error: dict[str, str] | None = None) -> None:
    stored = handler.response_store.get(response_id)
    if _runs(stored):
        stored.status = status
        if error is not None:
            stored.error = error


async def _following(
    handler: Any, response_id: str, starting_after: int | None = None
) -> AsyncGenerator[Any, None]:
    found = handler.event_store.get(response_id)
    task = handler.background_tasks.get(response_id)
    if found is None and task is not None and not task.done():
        await asyncio.sleep(0)  # a new task creates the list of events in its first step
        found = handler.event_store.get(response_id)
    if found is None:
        raise refusal(Unsupported("stream: this response was not made with stream=true and background=true"))
    events, news = found
    place = 0 if starting_after is None else starting_after + 1
    while True:
        news.clear()
        while place < len(events):
            yield events[place]
            if events[place].type in ENDS:
                return
            place += 1
        if task is None or task.done():
            return
        await news.wait()


def response_routes(store: ResponseStore) -> list[Route]:
    """Return the routes that read, cancel and delete stored answers."""

    async def read(request: Request, handler: Any, response_id: str) -> Response:
        asked = request.query_params
        if asked.get("stream", "").lower() not in ("1", "true"):
            return _shown(handler.response_store[response_id])
        after = asked.get("starting_after")
        if after is not None and not after.isdecimal():
            raise Unsupported("starting_after: the sequence_number of an event is needed")
        if response_id not in handler.event_store:
            raise Unsupported("stream: this response was not made with background=true and stream=true")
        events = handler.responses_background_stream_generator(response_id, int(after) if after else None)
        return StreamingResponse(_convert_stream_to_sse_events(events), media_type="text/event-stream")

    async def cancel(_: Request, handler: Any, response_id: str) -> Response:
        stored = handler.response_store.get(response_id)
        if not _runs(stored):
            raise Unsupported("only an unfinished background response can be cancelled")
        stored.status = "cancelled"
        if task := handler.background_tasks.get(response_id):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=5.0)
        return _shown(stored)

    async def delete(_: Request, __: Any, response_id: str) -> Response:
        store.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def route(path: str, answer: Answer, method: str) -> Route:
        async def answered(request: Request) -> Response:
            response_id = request.path_params["response_id"]
            try:
                if not store.on:  # clients expect 404 for an id
                    raise NoSuchResponse(NOT_KEPT)
                if problem := store.problem():
                    raise problem
                handler = store.find(response_id, tenant_of(request))
                if handler is None or response_id not in handler.response_store:
                    raise NoSuchResponse(f"there is no response {response_id!r}")
                return await answer(request, handler, response_id)
            except RequestFailed as error:
                return as_response(error)

        return Route(path, answered, methods=[method])

    return [
        route(_PATH, read, "GET"),
        route(_PATH, delete, "DELETE"),
        route(_PATH + "/cancel", cancel, "POST"),
    ]


def _shown(response: Any) -> Response:
    return JSONResponse(response.model_dump(mode="json", by_alias=True))
