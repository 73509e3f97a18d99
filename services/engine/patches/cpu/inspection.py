"""Inspect a model's class in this process.

vLLM does so in a subprocess, to leave CUDA untouched. At a model's first start that takes ten seconds of a
core per class and process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces("vllm.model_executor.models.registry:_run_in_subprocess")
def _run_here(original: Any, fn: Callable[[], Any]) -> Any:
    del original
    return fn()
