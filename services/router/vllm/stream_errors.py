"""Send errors inside vLLM's streams as OpenAI's error object, with our status and type.

Leans on: the handlers in vLLM's app.state, and, for those that stream,
GenerateBaseServing._convert_generation_error_to_streaming_response(error), whose text chat and completions
send before [DONE].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from baton.services.router.http.forms import openai_error
from baton.services.router.vllm.engine_client import RefusedByRouter

_CONVERT = "_convert_generation_error_to_streaming_response"


def handlers(state: Any) -> Iterator[Any]:
    """Yield each vLLM handler in an app's state once."""
    found = {id(one): one for one in vars(state)["_state"].values() if hasattr(one, "_check_model")}
    yield from found.values()


def word_stream_errors(state: Any) -> None:
    """Make every handler format errors in streams like the router's refusals."""
    for handler in handlers(state):
        if original := getattr(handler, _CONVERT, None):
            setattr(handler, _CONVERT, _worded(original))


def _worded(original: Callable[[Any], str]) -> Callable[[Any], str]:
    def worded(error: Any) -> str:
        if isinstance(error, RefusedByRouter):
            return json.dumps(openai_error(error.error))
        return original(error)

    return worded
