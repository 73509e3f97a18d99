"""Compile, in the worker's process, the grammars that passed their trial.

Compilers release the GIL while they work. Their threads have a lower priority than the engine's.

Leans on: vllm.v1.structured_output.StructuredOutputManager (backend, tokenizer, vllm_config, _create_grammar,
which reads `backend` of the object it is called on), Request.structured_output_request (grammar, which may be
set complete), StructuredOutputBackend.allocate_token_bitmask.
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
# CPU seconds of the compilation in its trial. Shorter compilations never wait behind longer ones.
SLOW_S = 0.2


class EngineGrammars:
    """The grammars of one engine."""

    def __init__(self, manager: Any) -> None:
        os.environ[REGEX_TIMEOUT] = "0"  # the trial has bounded it already
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
        """Return the future of a request's compilation, which took `seconds` in its trial.

        When it is done the request has its grammar; its exception is what the compiler raised.
        """
        lane = self._slow if seconds > SLOW_S else self._quick
        return lane.submit(self._compile, request)

    def close(self) -> None:
        for lane in (self._quick, self._slow):
            lane.shutdown(wait=False, cancel_futures=True)

    def _compile(self, request: Any) -> None:
        asked = request.structured_output_request
        manager = self._manager_of(asked.params._backend)
        asked.grammar = Metered(manager._create_grammar(request), fed=len(request.output_token_ids))

    def _manager_of(self, name: str) -> Any:
        """Return a view of vLLM's manager with this backend. Raises ValueError if it cannot be used."""
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
                    self._manager.backend = backend  # allocates the masks of a step
                view = self._managers[name] = copy.copy(self._manager)
                view.backend = backend
            return self._managers[name]


def _be_nice(nice: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
