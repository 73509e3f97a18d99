"""The health of a router over all its models; vLLM's app reports it for one model.

Leans on: the paths of vLLM's routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.services.router.errors import NoSuchModel
from baton.services.router.vllm.model_list import refused

# Requests to these paths name no model: they are about the router or the first model.
_WITHOUT_MODEL = frozenset({"/ping", "/inference/v1/abort_requests"})


def model_paths(app: Any) -> frozenset[str]:
    """Return the paths that need a model's name: all that take a body, except a stored response's."""
    posted = (route.path for route in app.router.routes if "POST" in (getattr(route, "methods", None) or ()))
    return frozenset(path for path in posted if "{" not in path) - _WITHOUT_MODEL


def routes_of_all(apps: Mapping[str, Any]) -> list[Route]:
    """Return the health routes over the apps of all models, by model name."""

    async def health(request: Request) -> Response:
        """Answer 200 if any model can be served, or the one that the query `model` names."""
        asked = request.query_params.get("model")
        if asked is not None and asked not in apps:
            return refused(
                NoSuchModel(f"The model `{asked}` does not exist. Served here: {', '.join(apps)}.")
            )
        chosen = {asked: apps[asked]} if asked is not None else apps
        found = {name: await app.state.engine_client.health() for name, app in chosen.items()}
        well = any(one.ok for one in found.values())
        states = {name: "ok" if one.ok else one.reason for name, one in found.items()}
        body = {"status": "ok" if well else "unavailable", "models": states}
        return JSONResponse(body, status_code=200 if well else 503)

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
    ]
