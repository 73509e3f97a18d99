"""Check a grammar's size and form in the router, without parsing or compiling it.

vLLM's front end parses each grammar on its event loop: a schema with a chain of 2,000 references and a
`multipleOf` ends the process, and `minItems` of 10^9 takes 11 GiB. Here workers do these checks in a process
that can be killed (services/engine/grammars); a refusal is still a 400. Every grammar, even one from tools,
ends up in SamplingParams.structured_outputs, so the size is checked there.

Leans on: vllm.v1.structured_output.backend_{xgrammar,guidance,outlines,lm_format_enforcer}'s checks and
vllm.sampling_params._get_llg_tokenizer, which SamplingParams._validate_structured_outputs and the protocols
look up when they need them; backend_xgrammar.has_xgrammar_unsupported_json_features,
vllm.sampling_params.check_json_nesting, StructuredOutputsParams (its fields).
"""

from __future__ import annotations

import json
from collections.abc import Callable
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

# For a schema, choices, regex or grammar, even from tools. 10,000 choices (59 KB) took 0.5 s to compile.
MAX_GRAMMAR_BYTES = 128 << 10
_FIELDS = ("json", "regex", "choice", "grammar", "structural_tag")


def leave_to_workers() -> None:
    """Make vLLM in this process check only the form; a second call does nothing. Raises StartError."""
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
