"""Keep a seeded request alive whose prompt takes several steps.

Its generator stays out of the steps whose sample is dropped: vLLM would rewind it for them, and a CPU
generator has no offset to rewind.

Leans on: vllm.v1.worker.gpu_model_runner.GPUModelRunner (sample_tokens, input_batch.{generators, num_reqs},
discard_request_mask).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(GPUModelRunner, "sample_tokens", _holding_back_generators, ("self", "grammar_output"))


def _holding_back_generators(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        generators = self.input_batch.generators
        if not generators:
            return original(self, grammar_output)
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        held = {index: generators.pop(index) for index in list(generators) if discarded[index]}
        try:
            return original(self, grammar_output)
        finally:
            generators.update(held)

    return sample_tokens
