"""Bound error texts, so that megabytes from a request are neither searched nor sent back.

vLLM's errors quote values of the request, and it searches them for paths in quadratic time: a model name of
32 KB blocked the router for minutes.

Leans on: sanitize_message(message) by its name in the modules of vllm.entrypoints that use it (`_USERS`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

from baton.services.engine.patches.replace import replace
from baton.services.router.errors import shortened

_USERS = (
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.serve.exception_handling.error_response",
    "vllm.entrypoints.serve.exception_handling.handlers.http",
    "vllm.entrypoints.serve.exception_handling.handlers.validation",
)
_QUICK = 400  # characters, which vLLM searches in up to 8 ms
_PATH = re.compile(r"(?:/[\w\-]+){3,}")


def bound_error_texts() -> None:
    """Bound the errors of all vLLM handlers; a second call does nothing."""
    for name in _USERS:
        replace(importlib.import_module(name), "sanitize_message", _bounded, ("message",))


def _bounded(sanitize: Callable[[str], str]) -> Callable[[str], str]:
    def bounded(message: str) -> str:
        if len(message) > _QUICK:
            message = _PATH.sub("<path>", shortened(message))
        return sanitize(message)

    return bounded
