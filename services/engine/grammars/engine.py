"""Compile, in the worker's process, the grammars that passed their trial.

vLLM compiles all grammars with the first request's backend, in one queue. Here each grammar is compiled by
the backend of its own request, with a copy of vLLM's manager, before vLLM's scheduler sees the request.
Compilers release the GIL, and their threads have a lower priority than the engine's.
"""

from __future__ import annotations

import copy
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from baton.services.engine.grammars.backends import REGEX_TIMEOUT, make_backend
from baton.services.engine.grammars.metered import Metered

_NICE = 5
_SLOW_NICE = 10
# CPU seconds that compiling a grammar took in its trial. Quicker grammars never wait for slower ones.
SLOW_S = 0.2


class EngineGrammars:
    def __init__(self, manager: Any) -> None:
        os.environ[REGEX_TIMEOUT] = "0"  # the trial has already limited the time
        self._manager = manager
        self._managers: dict[str, Any] = {}  # keyed by backend name
        self._lock = threading.Lock()
        self._width = 0
        self._quick = ThreadPoolExecutor(1, "grammar", initializer=_be_nice, initargs=(_NICE,))
        self._slow = ThreadPoolExecutor(1, "slow-grammar", initializer=_be_nice, initargs=(_SLOW_NICE,))

    @property
    def config(self) -> Any:
        return self._manager.vllm_config

    def compile(self, request: Any, seconds: float) -> Any:
        """Compile a request's grammar in a thread; return a future. seconds: what that took in the trial."""
        lane = self._slow if seconds > SLOW_S else self._quick
        return lane.submit(self._compile, request)

    def close(self) -> None:
        for lane in (self._quick, self._slow):
            lane.shutdown(wait=False, cancel_futures=True)

    def _compile(self, request: Any) -> None:
        asked = request.structured_output_request
        manager = self._manager_of(asked.params._backend)
        grammar = manager._create_grammar(request)
        if request.output_token_ids:
            _feed(manager, grammar, request)
        asked.grammar = Metered(grammar, fed=len(request.output_token_ids))

    def _manager_of(self, name: str) -> Any:
        with self._lock:
            if name not in self._managers:
                backend = make_backend(name, self.config, self._manager.tokenizer)
                width = backend.allocate_token_bitmask(1).shape[1]
                if self._width not in (0, width):
                    raise ValueError(
                        f"the backend {name!r} cannot serve requests beside others of this model: its tokens "
                        f"take {width} words of a mask, theirs {self._width}"
                    )
                self._width = width
                if self._manager.backend is None:
                    self._manager.backend = backend  # this backend allocates each step's masks
                view = self._managers[name] = copy.copy(self._manager)
                view.backend = backend
            return self._managers[name]


def _feed(manager: Any, grammar: Any, request: Any) -> None:
    """Feed `grammar` a request's past output: vLLM's accept_tokens feeds only the request's own grammar."""
    tokens = list(request.output_token_ids)
    start, _ = manager._get_constraint_bounds(request, tokens, spec_tokens_committed=True)
    if start > len(tokens):
        return  # still reasoning
    request.structured_output_request.reasoning_ended = True
    if not grammar.accept_tokens(request.request_id, tokens[start:]):
        raise ValueError(
            f"the grammar of request {request.request_id} does not allow its output: {tokens[start:]}"
        )


def _be_nice(nice: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
