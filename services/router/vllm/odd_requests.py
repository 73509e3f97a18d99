"""Answer 400 if vLLM's handlers fail on a request before it is placed.

The handlers turn ValueError, TypeError and OverflowError into 400 themselves. Odd requests raise other errors
too (an assistant's message with empty content: IndexError), which would be 500. Before a request is placed,
the only code of ours that runs is admission, whose refusals have their own status. Later errors stay 500.
Paths and methods without a route get OpenAI's error object as well.

Leans on: vllm.entrypoints.serve.exception_handling.handlers.exception.exception_handler (its 500) and
.error_response.create_error_response.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from traceback import extract_tb
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler

from baton.services.router.http.admission import current_admission

UNFORESEEN = (LookupError, AttributeError, RecursionError)
_MOST_PLACES = 100

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
    status = HTTPStatus(error.status_code)
    response = create_error_response(
        f"{request.method} {request.url.path}: {error.detail}",
        err_type="".join(status.phrase.split()) + "Error",
        status_code=status,
    )
    return JSONResponse(response.model_dump(), status_code=status, headers=error.headers)


def _report(error: Exception) -> None:
    frame = extract_tb(error.__traceback__)[-1]
    place = f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
    if place not in _logged and len(_logged) < _MOST_PLACES:
        _logged.add(place)
        log.warning("a request was refused (400): its handler failed; logged once: %s", place, exc_info=error)
