"""List the parameters of vLLM's methods that more than one patch wraps."""

from __future__ import annotations

# vllm.v1.worker.gpu_model_runner.GPUModelRunner
INIT = ("self", "vllm_config", "device")
PROPOSE_DRAFT_TOKEN_IDS = (
    *("self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states"),
    *("sample_hidden_states", "aux_hidden_states", "spec_decode_metadata"),
    *("common_attn_metadata", "slot_mappings"),
)
# vllm.v1.core.sched.scheduler.Scheduler
UPDATE_FROM_OUTPUT = ("scheduler_output", "model_runner_output")  # besides self
