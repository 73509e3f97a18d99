"""Writes down what vLLM finds out about the demo models' classes, in the cache that VLLM_CACHE_ROOT names.

    python -m harness.null_gpu.inspections

On a GPU each worker does so at a model's first start, in a process that imports vLLM anew: dozens of workers
that start together take minutes of a small machine. Here one process does it, for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

CLASSES = (
    "Qwen3ForCausalLM",
    "Qwen2ForCausalLM",
    "MiMoForCausalLM",
    "MiMoMTPModel",
    "Eagle3LlamaForCausalLM",
)


def main() -> None:
    """Inspect them."""
    from vllm.model_executor.models import registry

    def here(function: Callable[[], Any]) -> Any:
        return function()

    registry._run_in_subprocess = here
    for name in CLASSES:
        known = registry.ModelRegistry.models[name]
        known.inspect_model_cls()
    print(f"{len(CLASSES)} classes in {os.environ['VLLM_CACHE_ROOT']}")


if __name__ == "__main__":
    main()
