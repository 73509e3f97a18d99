"""Fill vLLM's cache in VLLM_CACHE_ROOT with its inspections of the model classes in CLASSES.

    python -m harness.null_gpu.inspections

On a GPU each worker inspects a model's class at its first start, in a process that imports vLLM again. For
dozens of workers that takes minutes on a small machine; here one process does it for all.
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
    "Glm4MoeForCausalLM",
    "Glm4MoeMTPModel",
    "DeepseekV3ForCausalLM",
    "DeepSeekMTPModel",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MTP",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
)


def main() -> None:
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
