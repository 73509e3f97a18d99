"""Let a request with drafts and a recurrent state miss a step and resume from the right state.

A model with states (Mamba, Gated DeltaNet) keeps one for each token of a step, and a request resumes from the
state of its last accepted token. vLLM keeps the number of accepted tokens by batch row, so a request that a
step leaves out loses its row, and would resume from the state of its first token. Here the number is kept
with the request. Preempted requests are recomputed, so they begin with their first state.
"""

from __future__ import annotations

from typing import Any

from baton.services.engine.patches.replace import replaces

_KEY = "_baton_accepted"  # attribute of a CachedRequestState that has no row


def keeps(config: Any) -> bool:
    """Return whether requests of this engine may be left out of steps."""
    if config.speculative_config is None or not config.model_config.is_hybrid:
        return True
    # Untested: model runner V2, which keeps the number by request, and asynchronous scheduling, which
    # computes it on the device from the step before. A prefix cache copies states whenever a block is full.
    return (
        not config.use_v2_model_runner
        and not config.scheduler_config.async_scheduling
        and config.cache_config.mamba_cache_mode == "none"
    )


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model")
def _keep(original: Any, self: Any, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
    if self.speculative_config is not None and self.model_config.is_hybrid:
        rows, scheduled = self.input_batch.req_id_to_index, scheduler_output.num_scheduled_tokens
        missing = [name for name in rows if name not in scheduled and name in self.requests]
        if missing and self.num_accepted_tokens_event is not None:
            self.num_accepted_tokens_event.synchronize()
        for name in missing:
            accepted = self.input_batch.num_accepted_tokens_cpu[rows[name]]
            setattr(self.requests[name], _KEY, int(accepted))
        for name in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            setattr(self.requests[name], _KEY, None)
    return original(self, scheduler_output, intermediate_tensors)


@replaces("vllm.v1.worker.gpu_input_batch:InputBatch.add_request")
def _restore(original: Any, self: Any, request: Any) -> Any:
    row = original(self, request)
    if (accepted := getattr(request, _KEY, None)) is not None:
        self.num_accepted_tokens_cpu[row] = accepted
        setattr(request, _KEY, None)
    return row
