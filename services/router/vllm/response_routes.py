"""Serve a tenant's stored responses at /v1/responses/ID: read, follow, cancel and delete.

Leans on: vllm.entrypoints.openai.responses.api_router._convert_stream_to_sse_events; of the handler its
response_store, event_store and responses_background_stream_generator(id, starting_after).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from vllm.entrypoints.openai.responses.api_router import _convert_stream_to_sse_events

from baton.services.router.errors import NoSuchResponse, RequestFailed, Unsupported
from baton.services.router.http.forms import error_response
from baton.services.router.vllm.response_store import ResponseStore, cancel, tenant_of

_PATH = "/v1/responses/{response_id}"

Answer = Callable[[Request, Any, str], Awaitable[Response]]


def response_routes(store: ResponseStore) -> list[Route]:

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

    async def end(request: Request, handler: Any, response_id: str) -> Response:
        del request
        cancelled = await cancel(handler, response_id)
        if cancelled is None:
            raise Unsupported("only an unfinished background response can be cancelled")
        return _shown(cancelled)

    async def delete(request: Request, handler: Any, response_id: str) -> Response:
        del request, handler
        store.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def route(path: str, answer: Answer, method: str) -> Route:
        async def answered(request: Request) -> Response:
            response_id = request.path_params["response_id"]
            try:
                if problem := store.problem():
                    raise _as_missing(problem)
                handler = store.find(response_id, tenant_of(request))
                if handler is None or response_id not in handler.response_store:
                    raise NoSuchResponse(f"there is no response {response_id!r}")
                return await answer(request, handler, response_id)
            except RequestFailed as error:
                start, body = error_response(error)
                return Response(body["body"], status_code=start["status"], media_type="application/json")

        return Route(path, answered, methods=[method])

    return [
        route(_PATH, read, "GET"),
        route(_PATH, delete, "DELETE"),
        route(_PATH + "/cancel", end, "POST"),
    ]


def _as_missing(problem: RequestFailed) -> RequestFailed:
    """Turn the refusal without a store into the 404 that clients expect for an id; keep others."""
    return NoSuchResponse(problem.message) if isinstance(problem, Unsupported) else problem


def _shown(response: Any) -> Response:
    return JSONResponse(response.model_dump(mode="json", by_alias=True))
