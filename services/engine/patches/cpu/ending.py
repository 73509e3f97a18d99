"""Let an engine's process end without collecting its garbage first.

Leans on: GPUModelRunner.shutdown(self), which Worker.shutdown calls last, after the connector's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(GPUModelRunner, "shutdown", at_once, ("self",))


def at_once(shipped: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that leaves the model and its KV cache to the process's end."""
    del shipped

    def shutdown(self: Any) -> None:
        del self

    return shutdown
