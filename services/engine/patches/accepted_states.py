"""Keep the state from which a request continues while a step that verifies drafts leaves it out.

A model that keeps states has one for each token of a step, and a request continues from that of its last
accepted token. The count of accepted tokens is kept by the batch's rows: a request that is not in a step
loses its row, and would come back with the state of its first token.

Leans on: vllm.v1.worker.gpu_model_runner.GPUModelRunner (_update_states, requests, input_batch, model_config,
speculative_config, num_accepted_tokens_event), vllm.v1.worker.gpu_input_batch.InputBatch (add_request, which
returns the row; req_id_to_index, num_accepted_tokens_cpu, which condense and swaps keep in order),
CachedRequestState (kept for a request until it is over), SchedulerOutput (num_scheduled_tokens,
scheduled_cached_reqs.resumed_req_ids: recomputed, so from its first state).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace

_KEY = "_baton_accepted"  # attribute of a CachedRequestState that is in no row


def install() -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(GPUModelRunner, "_update_states", _keeping, ("self", "scheduler_output"))
    replace(InputBatch, "add_request", _restoring, ("self", "request"))


def keeps(config: Any) -> bool:
    """Return whether a request may miss a step: whether this engine's runner keeps its state."""
    if config.speculative_config is None or not config.model_config.is_hybrid:
        return True
    # Model runner V2 keeps the number by request, and an asynchronous one computes it on the device from the
    # step before: neither has been tried. A prefix cache of states copies them when a block is full.
    return (
        not config.use_v2_model_runner
        and not config.scheduler_config.async_scheduling
        and config.cache_config.mamba_cache_mode == "none"
    )


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_states(self: Any, scheduler_output: Any) -> Any:
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
        return original(self, scheduler_output)

    return _update_states


def _restoring(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(self: Any, request: Any) -> Any:
        row = original(self, request)
        if (accepted := getattr(request, _KEY, None)) is not None:
            self.num_accepted_tokens_cpu[row] = accepted
            setattr(request, _KEY, None)
        return row

    return add_request
