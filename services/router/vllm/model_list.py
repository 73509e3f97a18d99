"""List and retrieve a router's models and adapters, in OpenAI's or Anthropic's form.

Leans on: vllm.entrypoints.openai.models.serving.OpenAIServingModels.show_available_models (app.state.
openai_serving_models), its ModelList and the fields id, created and max_model_len of its cards.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.services.router.errors import NoSuchModel
from baton.services.router.http.forms import error_response, is_anthropics, route_path

PATH = "/v1/models"


def model_routes(apps: Iterable[Any]) -> list[Route]:
    """Return the routes of /v1/models over all models' apps, in this order."""
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
        return refused(NoSuchModel(f"The model `{name}` does not exist."))

    return [
        Route(PATH, listed, methods=["GET"]),
        Route(PATH + "/{name:path}", retrieved, methods=["GET"]),  # names from hubs contain a slash
    ]


def refused(error: NoSuchModel) -> Response:
    """Return the 404 for an unknown name."""
    start, body = error_response(error)
    return Response(body["body"], status_code=start["status"], media_type="application/json")


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
