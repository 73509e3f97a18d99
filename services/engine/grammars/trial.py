"""Try a grammar in a separate process, which is killed if it takes too long.

vLLM's own checks choose the backend, which compiles the grammar; then the trial walks through it. Whatever
goes wrong, even a segmentation fault, ends only this process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from baton.services.engine.grammars.backends import (
    REGEX_TIMEOUT,
    compiled_bytes,
    make_backend,
    native_checks,
    parse_schema,
)
from baton.services.engine.grammars.messages import Verdict
from baton.services.engine.grammars.productive import has_an_end
from baton.services.engine.grammars.walk import TooCostly, Walker
from baton.services.errors import describe

logger = logging.getLogger(__name__)

# Maximum bytes of a compiled grammar, kept by its request and the compiler's cache (VLLM_XGRAMMAR_CACHE_MB).
# A schema of 20 KB took 2.5 MiB, 10,000 choices 19 MiB, a regex of 3.4 KB 87 MiB.
_MOST_COMPILED = 32 << 20
_MOST_WORDS = 1000  # characters of an error, because some errors repeat the grammar
# Bytes of the largest grammar that is searched for rules without an end, which takes about 0.3 s.
_MOST_SERIALIZED = 2 << 20


@dataclass(frozen=True)
class Context:
    """The parts of the engine's configuration that a trial needs."""

    model_config: Any
    structured_outputs_config: Any
    speculative_tokens: int

    @classmethod
    def of(cls, config: Any) -> Context:
        from vllm.transformers_utils.config import maybe_register_config_serialize_by_value

        maybe_register_config_serialize_by_value()
        spec = config.speculative_config
        drafted = spec.num_speculative_tokens if spec is not None else 0
        return cls(config.model_config, config.structured_outputs_config, drafted)

    def config(self) -> Any:
        """Return an object with the parts of VllmConfig that vLLM's backends read."""
        spec = SimpleNamespace(num_speculative_tokens=self.speculative_tokens)
        return SimpleNamespace(
            model_config=self.model_config,
            structured_outputs_config=self.structured_outputs_config,
            speculative_config=spec if self.speculative_tokens else None,
        )


class Bench:
    """The tokenizer and the backends, made once in the helper and inherited by its trials."""

    def __init__(self, context: Context) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        _restore_checks()
        os.environ[REGEX_TIMEOUT] = "0"  # this limits wall time, which depends on the machine's load
        self._context = context
        self._tokenizer = cached_tokenizer_from_config(model_config=context.model_config)
        self._backends: dict[str, Any] = {}

    def prepare(self) -> None:
        """Make the backends that most requests need, so that trials need not."""
        for name in ("xgrammar", "guidance"):
            try:
                self.backend(name)
            except Exception:  # an unsupported tokenizer, which vLLM's checks will report for each request
                logger.warning("grammars: no backend %s for this tokenizer", name, exc_info=True)

    def backend(self, name: str) -> Any:
        if name not in self._backends:
            self._backends[name] = make_backend(name, self._context.config(), self._tokenizer)
        return self._backends[name]

    def try_out(self, params: Any) -> Verdict:
        asked = params.structured_outputs
        asked._backend, asked._backend_was_auto = None, False
        try:
            settings = self._context.structured_outputs_config
            params._validate_structured_outputs(self._context.model_config, settings, self._tokenizer)
        except Exception as error:  # noqa: BLE001 (the request is at fault, as in vLLM's front end)
            return Verdict(problem=describe(error)[:_MOST_WORDS])
        backend = self.backend(params.structured_outputs._backend)
        began = time.process_time()
        try:
            grammar = _compiled(backend, params)
        except Exception as error:  # noqa: BLE001 (reported to the client)
            if "bad_alloc" in str(error):
                raise MemoryError from None
            return Verdict(problem=f"this grammar cannot be compiled: {describe(error)[:_MOST_WORDS]}")
        seconds = time.process_time() - began
        if (size := compiled_bytes(grammar)) > _MOST_COMPILED:
            return Verdict(
                problem=f"this grammar is too costly: it takes {size >> 20} MiB, {_MOST_COMPILED >> 20} are "
                "allowed; use fewer properties or alternatives, and repetitions with smaller bounds"
            )
        problem = self._problem(grammar, backend, params)
        return Verdict(problem, params.structured_outputs, seconds)

    def _problem(self, grammar: Any, backend: Any, params: Any) -> str:
        settings = self._context.structured_outputs_config
        thinks = bool(settings.reasoning_parser) and not settings.enable_in_reasoning
        walker = Walker(grammar, backend, params, thinks=thinks)
        if not walker.can_begin() or not self._ends(params):
            return "no answer satisfies this grammar"
        try:
            walker.measure()
        except TooCostly as error:
            return str(error)
        if not walker.can_be_followed():
            return (
                "no answer satisfies this grammar together with the request's allowed_token_ids, bad_words, "
                "stop tokens or min_tokens"
            )
        return ""

    def _ends(self, params: Any) -> bool:
        if params.structured_outputs._backend != "xgrammar":
            return True  # guidance checks this itself
        # An answer to a client's own grammar may end at max_tokens, but an answer that ends within a schema
        # is useless.
        parsed = parse_schema(params)
        serialized = parsed.serialize_json() if parsed is not None else ""
        return not 0 < len(serialized) < _MOST_SERIALIZED or has_an_end(serialized)


def _compiled(backend: Any, params: Any) -> Any:
    from vllm.v1.structured_output.request import get_structured_output_key

    kind, source = get_structured_output_key(params.structured_outputs)
    grammar = backend.compile_grammar(kind, source, stop_token_ids=params.all_stop_token_ids)
    matcher = getattr(grammar, "ll_matcher", None)
    if matcher is not None and (error := matcher.get_error()):
        raise ValueError(error)
    return grammar


def _restore_checks() -> None:
    """Restore the checks that router processes turn off and leave to workers."""
    for module, name in native_checks():
        function: Callable[..., Any] = getattr(module, name)
        setattr(module, name, getattr(function, "__wrapped__", function))
