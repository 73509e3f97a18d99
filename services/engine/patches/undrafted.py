"""Decode some requests without drafts, beside others with drafts, so that they get what they ask for.

- A seed: verification draws random numbers for each draft, and how many drafts there are depends on the other
  requests of the batch, so vLLM's seeds reproduce nothing under speculation. Without drafts a seed gives the
  same output as without speculation, which is its purpose.
- min_p and logit_bias: vLLM applies them to the token that follows the drafts, not to those that verify them,
  and so refuses them under speculation. Without drafts there is only that token.

Greedy requests with a seed keep their drafts: they draw nothing. This is only for CPU, where model runner V1
without asynchronous scheduling takes a list of drafts per request. Elsewhere seeds behave as in vLLM. Model
runner V2 applies the two others to all logits that verify drafts; V1 on a GPU refuses them (step_checks.py).

Leans on: vllm.v1.worker.gpu_model_runner.GPUModelRunner.propose_draft_token_ids (gives a list, or a tensor
[requests, drafts], which its caller also takes as lists), build_logitsprocs as imported there,
vllm.v1.sample.metadata.SamplingMetadata (generators: by row, of requests that have a seed and are sampled;
logitsprocs), vllm.v1.sample.logits_processor.{LogitsProcessors, MinPLogitsProcessor (min_p_count, min_p_cpu),
LogitBiasLogitsProcessor (biases, by row)}, vllm.v1.sample.rejection_sampler.RejectionSampler (samples the
token after the drafts with all processors, and the drafts' with none of these), vllm.platforms.
current_platform.is_cpu.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from baton.services.engine.patches.replace import replace
from baton.services.engine.patches.signatures import PROPOSE_DRAFT_TOKEN_IDS


def supported() -> bool:
    """Return whether single requests can go without drafts on this machine."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def install() -> None:
    from vllm.v1.worker import gpu_model_runner

    replace(gpu_model_runner.GPUModelRunner, "propose_draft_token_ids", _sparing, PROPOSE_DRAFT_TOKEN_IDS)
    build = ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs")
    replace(gpu_model_runner, "build_logitsprocs", _with_all, build)


def _sparing(original: Callable[..., Any]) -> Callable[..., Any]:
    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled: Any, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        drafts = original(self, scheduler_output, sampled, sampling_metadata, *args, **kwargs)
        spared = _rows(sampling_metadata)
        if not spared:
            return drafts
        rows: list[list[int]] = drafts if isinstance(drafts, list) else drafts.tolist()
        return [[] if row in spared else tokens for row, tokens in enumerate(rows)]

    return propose_draft_token_ids


def _rows(sampling_metadata: Any) -> set[int]:
    from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinPLogitsProcessor

    rows = set(sampling_metadata.generators)
    for processor in sampling_metadata.logitsprocs.all:
        if isinstance(processor, LogitBiasLogitsProcessor):
            rows |= processor.biases.keys()
        elif isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
            rows.update(processor.min_p_cpu.nonzero()[0].tolist())
    return rows


def _with_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_logitsprocs(
        vllm_config: Any, device: Any, is_pin_memory: bool, is_pooling_model: bool, *args: Any
    ) -> Any:
        from vllm.v1.sample import logits_processor as processors

        built = original(vllm_config, device, is_pin_memory, is_pooling_model, *args)
        if not vllm_config.speculative_config or is_pooling_model:
            return built
        left_out = (processors.MinPLogitsProcessor, processors.LogitBiasLogitsProcessor)
        return processors.LogitsProcessors(
            chain(built.all, (one(vllm_config, device, is_pin_memory) for one in left_out))
        )

    return build_logitsprocs
