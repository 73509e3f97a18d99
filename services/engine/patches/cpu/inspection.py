"""Inspect a model's class in this process instead of one that imports vLLM again.

Leans on: vllm.model_executor.models.registry._run_in_subprocess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.model_executor.models import registry

    replace(registry, "_run_in_subprocess", in_this_process, ("fn",))


def in_this_process(shipped: Callable[..., Any]) -> Callable[..., Any]:
    del shipped

    def run_in_this_process(fn: Callable[[], Any]) -> Any:
        return fn()

    return run_in_this_process
