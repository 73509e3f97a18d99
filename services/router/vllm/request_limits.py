"""Enforce limits on a parsed request before vLLM renders its prompts, and admit its images (`images`).

vLLM limits neither prompts times n, nor the size of a grammar's source, nor fields that cost the router's
loop more than their size suggests: 100 bad words of 60 KB took 2.5 s, the texts of /generative_scoring are
tokenized in the loop, and each tool of /v1/responses is dumped separately.

A grammar is neither parsed nor compiled here: a schema with a chain of 2,000 references and a `multipleOf`
ends the process, and `minItems` of 10^9 takes 11 GiB. Workers do so in a process that can be killed
(services/engine/grammars); a refusal is still a 400. Every grammar, even one from tools, ends up in
SamplingParams.structured_outputs.

Leans on: vllm.entrypoints.serve.engine.serving's _check_model(request), which every handler of init_app_state
awaits before it renders; the requests' fields n, prompt, messages, input, items, structured_outputs,
response_format, text, tools and tool_choice; vllm.v1.structured_output.backend_{xgrammar,
guidance,outlines,lm_format_enforcer}'s checks and vllm.sampling_params._get_llg_tokenizer, which
SamplingParams._validate_structured_outputs and the protocols look up when they need them;
backend_xgrammar.has_xgrammar_unsupported_json_features, vllm.sampling_params.check_json_nesting.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from vllm import sampling_params as vllm_params
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output import (
    backend_guidance,
    backend_lm_format_enforcer,
    backend_outlines,
    backend_xgrammar,
)

from baton.services.engine.patches.replace import replace
from baton.services.router.errors import Unsupported
from baton.services.router.media.door import MediaDoor
from baton.services.router.vllm.engine_client import refusal
from baton.services.router.vllm.error_responses import handlers
from baton.services.router.vllm.images import admit_images

MAX_SEQUENCES = 256  # prompts times n, per request
# Characters of all texts in a field; 16,384 take 20 ms to tokenize.
MAX_CHARACTERS: Mapping[str, int] = {
    "bad_words": 16 << 10,
    "stop": 16 << 10,
    "stop_sequences": 16 << 10,
    "query": 64 << 10,
    "items": 64 << 10,
    # These fields are sent to workers.
    **dict.fromkeys(("request_id", "user", "cache_salt", "prompt_cache_key"), 4 << 10),
}
MAX_TOOLS = 512  # OpenAI's own limit is 128


def limit_requests(state: Any, media: MediaDoor | None = None) -> None:
    """Check requests before every handler in an app's `state`. `media` admits images; None admits none."""
    for handler in handlers(state):
        handler._check_model = partial(_checked, handler, handler._check_model, media)


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


async def _checked(
    handler: Any, check: Callable[[Any], Awaitable[Any]], media: MediaDoor | None, request: Any
) -> Any:
    if problem := _problem(request):
        raise refusal(Unsupported(problem))
    if (error := await check(request)) is not None:
        return error
    await admit_images(request, media, handler)
    return None


def _problem(request: Any) -> str:
    if (wanted := sequences(request)) > MAX_SEQUENCES:
        return f"the request asks for {wanted} answers; {MAX_SEQUENCES} are allowed"
    if problem := too_large(grammar_bytes(request)):
        return problem
    return field_problem(request)


def _length(value: Any) -> int:
    """Count a field's prompts. A text, a list of token ids or a list of messages counts as one."""
    if not isinstance(value, list | tuple) or not value:
        return 1
    many = isinstance(value[0], str | list | tuple)
    return len(value) if many else 1


# For a schema, choices, regex or grammar, even from tools. 10,000 choices (59 KB) took 0.5 s to compile.
MAX_GRAMMAR_BYTES = 128 << 10
_FIELDS = ("json", "regex", "choice", "grammar", "structural_tag")


def leave_to_workers() -> None:
    """Make vLLM here check only the form of grammars; a second call does nothing. Raises StartError."""
    replace(backend_xgrammar, "validate_xgrammar_grammar", _form)
    replace(backend_guidance, "validate_guidance_grammar", _nothing, ("sampling_params", "tokenizer"))
    replace(backend_outlines, "validate_structured_output_request_outlines", _nothing, ("params",))
    replace(
        backend_lm_format_enforcer,
        "validate_structured_output_request_lm_format_enforcer",
        _nothing,
        ("params",),
    )
    replace(vllm_params, "_get_llg_tokenizer", _nothing, ("tokenizer",))


def size_problem(params: Any) -> str:
    """Return why the grammar of these SamplingParams is refused, or ""."""
    asked = getattr(params, "structured_outputs", None)
    if asked is None:
        return ""
    return too_large(sum(len(str(value)) for name in _FIELDS if (value := getattr(asked, name)) is not None))


def too_large(size: int) -> str:
    """Return why a grammar of this many bytes is refused, or ""."""
    if size <= MAX_GRAMMAR_BYTES:
        return ""
    return f"the answer's grammar or schema has {size} bytes; {MAX_GRAMMAR_BYTES} are allowed"


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def _form(original: Callable[..., Any], sampling_params: Any) -> None:
    del original
    asked = sampling_params.structured_outputs
    if asked is None:
        return
    if asked.regex and "\x00" in asked.regex:
        raise ValueError("structured_outputs.regex must not contain a NUL character ('\\x00')")
    if asked.json:
        vllm_params.check_json_nesting(asked.json)
        schema = _loads(asked.json, "JSON grammar") if isinstance(asked.json, str) else asked.json
        if backend_xgrammar.has_xgrammar_unsupported_json_features(schema):
            raise VLLMValidationError("The provided JSON schema contains features not supported by xgrammar.")
    if asked.structural_tag:
        vllm_params.check_json_nesting(asked.structural_tag, structural_tag=True)
        _loads(asked.structural_tag, "structural tag")


def _loads(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise VLLMValidationError(f"Invalid {what} specification.") from error
