"""Enforce limits on a parsed request before vLLM renders its prompts, and admit its images (`images`).

vLLM limits neither prompts times n, nor the size of a grammar's source, nor fields that cost the router's
loop more than their size suggests: 100 bad words of 60 KB took 2.5 s, the texts of /generative_scoring are
tokenized in the loop, and each tool of /v1/responses is dumped separately.

Leans on: vllm.entrypoints.serve.engine.serving's _check_model(request), which every handler of
init_app_state awaits before it renders; the requests' fields n, prompt, messages, input, items,
structured_outputs, response_format, text, tools and tool_choice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from baton.services.router.errors import Unsupported
from baton.services.router.media.door import MediaDoor
from baton.services.router.vllm.engine_client import refusal
from baton.services.router.vllm.error_responses import handlers
from baton.services.router.vllm.grammar_checks import too_large
from baton.services.router.vllm.images import admit_images

MAX_SEQUENCES = 256  # prompts times n, per request
# Characters of all texts in a field; 16,384 take 20 ms to tokenize.
MAX_CHARACTERS: Mapping[str, int] = {
    "bad_words": 16 << 10,
    "stop": 16 << 10,
    "stop_sequences": 16 << 10,
    "query": 64 << 10,
    "items": 64 << 10,
    # These are sent along to workers.
    **dict.fromkeys(("request_id", "user", "cache_salt", "prompt_cache_key"), 4 << 10),
}
MAX_TOOLS = 512  # OpenAI's own limit is 128

Check = Callable[[Any], Awaitable[Any]]


def limit_requests(state: Any, media: MediaDoor | None = None) -> None:
    """Check requests before every handler in an app's `state`. `media` admits their images; None: none is."""
    for handler in handlers(state):
        handler._check_model = _checked(handler, media)


def sequences(request: Any) -> int:
    each = max(1, getattr(request, "n", None) or 1)
    return each * max(_length(getattr(request, name, None)) for name in ("prompt", "messages", "items"))


def grammar_bytes(request: Any) -> int:
    """Return the approximate size in bytes of the schema or grammar that the answer must follow."""
    asked = [getattr(request, name, None) for name in ("structured_outputs", "response_format", "text")]
    if getattr(request, "tool_choice", None) not in (None, "none", "auto"):
        asked.append(getattr(request, "tools", None))  # the answer must follow one of their schemas
    return sum(len(str(one)) for one in asked if one is not None)


def field_problem(request: Any) -> str:
    """Return why a request's fields are refused, or ""."""
    for name, allowed in MAX_CHARACTERS.items():
        size = sum(map(len, _texts(getattr(request, name, None))))
        if size > allowed:
            return f"{name} has {size} characters; {allowed} are allowed (docs/limits.md)"
    tools = getattr(request, "tools", None)
    if tools and len(tools) > MAX_TOOLS:
        return f"tools has {len(tools)} entries; {MAX_TOOLS} are allowed (docs/limits.md)"
    return ""


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return (value,)
    return (one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def _checked(handler: Any, media: MediaDoor | None) -> Check:
    check = handler._check_model

    async def checked(request: Any) -> Any:
        if problem := _problem(request):
            raise refusal(Unsupported(problem))
        if (error := await check(request)) is not None:
            return error
        await admit_images(request, media, handler)
        return None

    return checked


def _problem(request: Any) -> str:
    if (wanted := sequences(request)) > MAX_SEQUENCES:
        return f"the request asks for {wanted} answers; {MAX_SEQUENCES} are allowed"
    if problem := too_large(grammar_bytes(request)):
        return problem
    return field_problem(request)


def _length(value: Any) -> int:
    """Count a field's prompts. A text, a list of token ids or a list of messages is one."""
    if not isinstance(value, list | tuple) or not value:
        return 1
    many = isinstance(value[0], str | list | tuple)
    return len(value) if many else 1
