"""Make vLLM's grammar backends, each of which compiles in one thread.

vLLM's manager has one backend for all requests, which the first request chooses, so later grammars change
their meaning or are refused. And xgrammar's eight threads hinder each other: on two cores, 10,000 choices
took 13.4 s with eight threads and 0.5 s with one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
from collections.abc import Iterator
from typing import Any

from cachetools import LRUCache

# vLLM's time limit for compiling a regex; its thread continues after the limit anyway. 0: no limit.
REGEX_TIMEOUT = "VLLM_REGEX_COMPILATION_TIMEOUT_S"

# lm-format-enforcer is not supported, because it runs Python code of unlimited cost in each step.
_KINDS = {
    "xgrammar": ("backend_xgrammar", "XgrammarBackend"),
    "guidance": ("backend_guidance", "GuidanceBackend"),
    "outlines": ("backend_outlines", "OutlinesBackend"),
}
_OUTLINES_KEPT = 4  # vLLM caches 128 compiled regexes of any size, or all of them on disk
_making = threading.Lock()


def make_backend(name: str, config: Any, tokenizer: Any) -> Any:
    """Return a new backend. Raises ValueError for a name that is not served."""
    if name not in _KINDS:
        raise ValueError(f"the structured output backend {name!r} is not served")
    module, kind = _KINDS[name]
    with _one_thread():
        make = getattr(importlib.import_module(f"vllm.v1.structured_output.{module}"), kind)
        backend = make(config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size())
    if name == "outlines":
        backend.cache = LRUCache(_OUTLINES_KEPT)
    return backend


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Make compilers that are created inside the `with` block use one thread."""
    module: Any = importlib.import_module("xgrammar")
    with _making:
        original = module.GrammarCompiler

        def compiler(info: Any, **arguments: Any) -> Any:
            return original(info, **{**arguments, "max_threads": 1})

        module.GrammarCompiler = compiler
        try:
            yield
        finally:
            module.GrammarCompiler = original


def compiled_bytes(grammar: Any) -> int:
    """Return the size of a compiled xgrammar grammar, or 0 for other kinds, whose memory the trial limits."""
    compiled = getattr(grammar, "ctx", None)
    return int(compiled.memory_size_bytes) if compiled is not None else 0


def parse_schema(params: Any) -> Any:
    """Return the uncompiled xgrammar.Grammar of a request's schema, or None without a schema."""
    import xgrammar

    asked = params.structured_outputs
    if asked.json is None:
        return None
    schema = asked.json if isinstance(asked.json, str) else json.dumps(asked.json)
    return xgrammar.Grammar.from_json_schema(schema)


def native_checks() -> Iterator[tuple[Any, str]]:
    """Yield vLLM's grammar checks that compile or parse in C++ or Rust, as modules and names."""
    from vllm import sampling_params
    from vllm.v1.structured_output import (
        backend_guidance,
        backend_lm_format_enforcer,
        backend_outlines,
        backend_xgrammar,
    )

    yield backend_xgrammar, "validate_xgrammar_grammar"
    yield backend_guidance, "validate_guidance_grammar"
    yield backend_outlines, "validate_structured_output_request_outlines"
    yield backend_lm_format_enforcer, "validate_structured_output_request_lm_format_enforcer"
    yield sampling_params, "_get_llg_tokenizer"
