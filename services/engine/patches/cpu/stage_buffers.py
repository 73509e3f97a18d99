"""Make the buffers in which a pipeline's later stages receive hidden states.

vLLM makes them in its warm-up, which it skips on a CPU if nothing is compiled and the KV cache's size is
given. The first step then fails.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sync_and_gather_intermediate_tensors")
def _make_buffers(
    original: Any, self: Any, num_tokens: int, intermediate_tensors: Any, sync_self: bool
) -> Any:
    if self.intermediate_tensors is None:
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
    return original(self, num_tokens, intermediate_tensors, sync_self)
