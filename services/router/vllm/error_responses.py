"""Correct the error responses of vLLM's handlers.

- Requests on which a handler fails before they are placed get 400: for example, an assistant's message with
  empty content raises IndexError. Later errors stay 500.
- Paths and methods without a route get OpenAI's error object.
- An error inside a stream has the status and type of the router's refusal.
- Error texts are capped: vLLM searches them for paths in quadratic time.

Leans on: vllm.entrypoints.serve.exception_handling.handlers.exception.exception_handler (its 500) and
.error_response.create_error_response; sanitize_message(message) by its name in the modules of
vllm.entrypoints that use it (`_SANITIZING`); the handlers in vLLM's app.state, and, for those that stream,
GenerateBaseServing._convert_generation_error_to_streaming_response(error), whose text chat and completions
send before [DONE].
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from traceback import extract_tb
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler

from baton.services.engine.patches.replace import replace
from baton.services.router.errors import RequestFailed, shortened
from baton.services.router.http.admission import current_admission
from baton.services.router.http.forms import as_response, openai_error
from baton.services.router.vllm.engine_client import RefusedByRouter

UNFORESEEN = (LookupError, AttributeError, RecursionError)
_MOST_PLACES = 100
_CONVERT = "_convert_generation_error_to_streaming_response"
_SANITIZING = (
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.serve.exception_handling.error_response",
    "vllm.entrypoints.serve.exception_handling.handlers.http",
    "vllm.entrypoints.serve.exception_handling.handlers.validation",
)
_QUICK = 400  # characters, which vLLM searches in up to 8 ms
_PATH = re.compile(r"(?:/[\w\-]+){3,}")

log = logging.getLogger(__name__)
_logged: set[str] = set()  # each place in the code is logged once


async def unforeseen(request: Request, error: Exception) -> Response:
    """Respond with 400 before the request is placed, with vLLM's own 500 afterwards."""
    admission = current_admission.get()
    if admission is None or admission.states:
        return await exception_handler(request, error)  # type: ignore[no-any-return]
    response = unforeseen_error(error)
    return JSONResponse(response.model_dump(), status_code=response.error.code)


def unforeseen_error(error: Exception) -> Any:
    """Return vLLM's ErrorResponse: 400 before the request is placed, 500 afterwards."""
    admission = current_admission.get()
    if admission is None or admission.states:
        return create_error_response(error)
    _report(error)
    return create_error_response(
        f"the request cannot be processed: {type(error).__name__}: {error}",
        status_code=HTTPStatus.BAD_REQUEST,
    )


async def not_offered(request: Request, error: HTTPException) -> Response:
    """Respond with OpenAI's error object, unlike Starlette, if there is no route."""
    why = f"{request.method} {request.url.path}: {error.detail}"
    response = as_response(RequestFailed(why, status=HTTPStatus(error.status_code)))
    response.headers.update(error.headers or {})
    return response


def _report(error: Exception) -> None:
    frame = extract_tb(error.__traceback__)[-1]
    place = f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
    if place not in _logged and len(_logged) < _MOST_PLACES:
        _logged.add(place)
        log.warning("a request was refused (400): its handler failed; logged once: %s", place, exc_info=error)


def handlers(state: Any) -> Iterable[Any]:
    """Return each vLLM handler in an app's state once."""
    return {id(one): one for one in vars(state)["_state"].values() if hasattr(one, "_check_model")}.values()


def word_stream_errors(state: Any) -> None:
    """Make every handler format errors in streams like the router's refusals."""
    for handler in handlers(state):
        if original := getattr(handler, _CONVERT, None):
            setattr(handler, _CONVERT, partial(_worded, original))


def _worded(original: Callable[[Any], str], error: Any) -> str:
    if isinstance(error, RefusedByRouter):
        return json.dumps(openai_error(error.error))
    return original(error)


def bound_error_texts() -> None:
    """Cap the length of error messages of all vLLM handlers; a second call does nothing."""
    for name in _SANITIZING:
        replace(importlib.import_module(name), "sanitize_message", _bounded)


def _bounded(sanitize: Callable[[str], str], message: str) -> str:
    if len(message) > _QUICK:
        message = _PATH.sub("<path>", shortened(message))
    return sanitize(message)
