"""Route each request to the app of the model or adapter that its body names.

This costs one dictionary look-up, however many models there are: admission has already read the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.services.router.errors import NoSuchModel, RequestFailed, Unsupported
from baton.services.router.http.admission import current_admission
from baton.services.router.http.forms import App, Receive, Scope, Send, error_response, route_path


class ModelMiddleware:
    """Pure ASGI middleware. Must be the innermost one: admission reads the body."""

    def __init__(self, app: App, apps: Mapping[str, App | None], paths: frozenset[str]) -> None:
        """Route requests on `paths` to `apps`, by model; None stands for `app`, which gets all others."""
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
            for part in error_response(error):
                await send(part)
            return
        await app(scope, receive, send)

    def _chosen(self, name: Any) -> App:
        """Return the app for a request. Raises Unsupported (400) and NoSuchModel (404)."""
        if name is None or name == "":
            raise Unsupported(
                f"several models are served here: name one in the field 'model': {self._served}"
            )
        if not isinstance(name, str):
            return self._app  # vLLM's validation refuses it
        if name not in self._apps:
            raise NoSuchModel(f"The model `{name}` does not exist. Served here: {self._served}.")
        return self._apps[name] or self._app
