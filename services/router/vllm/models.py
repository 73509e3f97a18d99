"""One router for several models: requests are routed by model; /v1/models and /health cover all of them.

Leans on: vllm.entrypoints.openai.models.serving.OpenAIServingModels.show_available_models (app.state.
openai_serving_models), its ModelList and the fields id, created and max_model_len of its cards; the paths of
vLLM's routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.services.router.errors import NoSuchModel, RequestFailed, Unsupported
from baton.services.router.http.admission import current_admission
from baton.services.router.http.forms import as_response, is_anthropics, route_path, send_error

_MODELS = "/v1/models"
# Requests to these paths name no model: they concern the router or the first model.
_WITHOUT_MODEL = frozenset({"/ping", "/inference/v1/abort_requests"})


class ModelMiddleware:
    """Pure ASGI middleware. Must be the innermost one: admission reads the body."""

    def __init__(self, app: ASGIApp, apps: Mapping[str, ASGIApp | None], paths: frozenset[str]) -> None:
        """Route requests on `paths` to `apps`, by model; None: `app`, which also gets all other requests."""
        self._app = app
        self._apps = apps
        self._paths = paths
        self._served = ", ".join(apps)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        admission = current_admission.get()
        try:
            app = self._chosen(admission.own.model if admission is not None else None)
        except RequestFailed as error:
            if admission is not None:
                admission.refuse(error)
            await send_error(send, error)
            return
        await app(scope, receive, send)

    def _chosen(self, name: Any) -> ASGIApp:
        if name is None or name == "":
            raise Unsupported(
                f"several models are served here: name one in the field 'model': {self._served}"
            )
        if not isinstance(name, str):
            return self._app  # vLLM's validation refuses it
        if name not in self._apps:
            raise NoSuchModel(f"The model `{name}` does not exist. Served here: {self._served}.")
        return self._apps[name] or self._app


def model_paths(app: Any) -> frozenset[str]:
    """Return the paths that need a model's name: all that take a body, except those of stored responses."""
    posted = (route.path for route in app.router.routes if "POST" in (getattr(route, "methods", None) or ()))
    return frozenset(path for path in posted if "{" not in path) - _WITHOUT_MODEL


def health_routes(apps: Mapping[str, Any]) -> list[Route]:
    """Return the health routes, which cover all models. `apps`: by model name."""

    async def health(request: Request) -> Response:
        """Answer 200 if any model, or the one that the query parameter `model` names, can be served."""
        asked = request.query_params.get("model")
        if asked is not None and asked not in apps:
            served = ", ".join(apps)
            return as_response(NoSuchModel(f"The model `{asked}` does not exist. Served here: {served}."))
        chosen = {asked: apps[asked]} if asked is not None else apps
        states = {name: await app.state.engine_client.health() or "ok" for name, app in chosen.items()}
        well = "ok" in states.values()
        body = {"status": "ok" if well else "unavailable", "models": states}
        return JSONResponse(body, status_code=200 if well else 503)

    return [Route("/health", health, methods=["GET"]), Route("/ping", health, methods=["GET", "POST"])]


def model_routes(apps: Iterable[Any]) -> list[Route]:
    """Return the routes of /v1/models, which list the models of all `apps` in this order."""
    apps = list(apps)

    async def whole() -> Any:
        lists = [await app.state.openai_serving_models.show_available_models() for app in apps]
        return lists[0].model_copy(update={"data": [one for each in lists for one in each.data]})

    async def listed(request: Request) -> Response:
        models = await whole()
        if not _is_anthropics(request):
            return JSONResponse(models.model_dump())
        found = [_information(card) for card in models.data]
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
        return JSONResponse({"data": found, "has_more": False, **ends})

    async def retrieved(request: Request) -> Response:
        name = request.path_params["name"]
        for card in (await whole()).data:
            if card.id == name:
                return JSONResponse(_information(card) if _is_anthropics(request) else card.model_dump())
        return as_response(NoSuchModel(f"The model `{name}` does not exist."))

    return [
        Route(_MODELS, listed, methods=["GET"]),
        Route(_MODELS + "/{name:path}", retrieved, methods=["GET"]),  # names from hubs contain a slash
    ]


def _is_anthropics(request: Request) -> bool:
    return is_anthropics(route_path(request.scope), request.scope["headers"])


def _information(card: Any) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
    }
