"""Decode requests with a seed, min_p or logit_bias without drafts, in the same batch as requests with drafts.

- Seeds: verification draws random numbers for each draft, and the number of drafts depends on other requests,
  so vLLM's seeds reproduce nothing under speculation. Greedy requests with a seed keep their drafts.
- min_p and logit_bias: vLLM applies them to the token after the drafts but not to the logits that verify
  drafts, and so refuses them under speculation.

Only for CPUs, where V1 without asynchronous scheduling takes lists of drafts. On GPUs seeds behave as in
vLLM; V2 applies min_p and logit_bias to drafts, and V1 refuses them (step_checks.py).
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from baton.services.engine.patches.drafts_v1 import PROPOSE_DRAFT_TOKEN_IDS
from baton.services.engine.patches.replace import replaces


def supported() -> bool:
    """Return whether individual requests can go without drafts on this machine."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids", *PROPOSE_DRAFT_TOKEN_IDS)
def _without_some(
    original: Any, self: Any, scheduler_output: Any, sampled: Any, sampling_metadata: Any, *args: Any
) -> Any:
    drafts = original(self, scheduler_output, sampled, sampling_metadata, *args)
    undrafted = _undrafted_rows(sampling_metadata)
    if not undrafted:
        return drafts
    rows: list[list[int]] = drafts if isinstance(drafts, list) else drafts.tolist()
    return [[] if row in undrafted else tokens for row, tokens in enumerate(rows)]


def _undrafted_rows(sampling_metadata: Any) -> set[int]:
    from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor

    rows = set(sampling_metadata.generators)  # rows with a seed that are not greedy
    for processor in sampling_metadata.logitsprocs.all:
        if isinstance(processor, LogitBiasLogitsProcessor):
            rows |= processor.biases.keys()
        elif isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            rows.update(processor.min_p_cpu.nonzero()[0].tolist())
    return rows


@replaces(
    "vllm.v1.worker.gpu_model_runner:build_logitsprocs",
    *("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
)
def _build_all(
    original: Any, vllm_config: Any, device: Any, is_pin_memory: bool, is_pooling_model: bool, *args: Any
) -> Any:
    from vllm.v1.sample import logits_processor as processors

    built = original(vllm_config, device, is_pin_memory, is_pooling_model, *args)
    if not vllm_config.speculative_config or is_pooling_model:
        return built
    left_out = (processors.MinPLogitsProcessor, processors.LogitBiasLogitsProcessor)
    return processors.LogitsProcessors(
        chain(built.all, (one(vllm_config, device, is_pin_memory) for one in left_out))
    )
