"""Prevent a crash of the engine when a seeded request's prompt takes several steps.

After a step whose sample is dropped, vLLM rewinds the generator, and a CPU generator has no offset to rewind.
Here the generators of such rows are withheld from the step.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens")
def _withhold_generators(original: Any, self: Any, grammar_output: Any) -> Any:
    generators = self.input_batch.generators
    if not generators:
        return original(self, grammar_output)
    discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
    withheld = {row: generators.pop(row) for row in list(generators) if discarded[row]}
    try:
        return original(self, grammar_output)
    finally:
        generators.update(withheld)
