"""Verify drafts with baton.kernels.verify instead of vLLM's RejectionSampler, if `verifier` is `baton`.

vLLM still applies everything that changes individual logits: penalties, bad words, allowed tokens, biases,
thinking budgets. The kernel applies temperature, min-p, top-k and top-p, and samples all rows. Steps with
seeded requests (vLLM's generators must give the same tokens whatever the other requests do), with
log-probabilities of processed logits, or with logits processors that are not vLLM's own stay with vLLM's
method, which has the same distribution. A request's rows are adjacent, the row after its drafts last;
cu_num_sampled_tokens says where they end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from baton.kernels.verify import DraftedTokens, Method, Sampling, verify
from baton.services.engine.patches.replace import replaces
from baton.services.engine.rank_settings import settings_of

_SEEDS = 1 << 62


def method_of(vllm_config: Any) -> Method | None:
    """Return our kernel's method of verification, or None if vLLM verifies."""
    spec = settings_of(vllm_config)
    return None if spec is None or spec.verifier != "baton" else spec.rejection_sample_method


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__")
def _add_verifier(original: Any, self: Any, vllm_config: Any, device: Any) -> None:
    original(self, vllm_config, device)
    method = method_of(vllm_config)
    if method is not None and hasattr(self, "rejection_sampler"):  # absent in ranks that do not draft
        self.rejection_sampler = Verifier(self.rejection_sampler, method)


class Verifier:
    """Replaces the RejectionSampler of a V1 model runner, and keeps it for steps that only it can verify."""

    def __init__(self, shipped: Any, method: Method) -> None:
        self.shipped = shipped
        self.method = method

    def __call__(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Verify the drafts in `metadata` against the target's logits [sum(drafts + 1), V]."""
        from vllm.v1.outputs import SamplerOutput

        if self.shipped.synthetic_mode or self._left_to_vllm(sampling_metadata):
            return self.shipped(metadata, draft_probs, logits, sampling_metadata)
        drafts = DraftedTokens(
            metadata.draft_token_ids, metadata.cu_num_sampled_tokens, metadata.max_spec_len, probs=draft_probs
        )
        found = verify(
            self._processed(metadata, logits, sampling_metadata),
            drafts,
            _sampling(sampling_metadata, len(metadata.num_draft_tokens), logits.device),
            method=self.method,
        )
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprobs = self.shipped._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                logits,
                logits[metadata.target_logits_indices],
                logits[metadata.bonus_logits_indices],
                found.tokens,
            )
        return SamplerOutput(sampled_token_ids=found.tokens, logprobs_tensors=logprobs)

    def _left_to_vllm(self, sampling_metadata: Any) -> bool:
        processors = sampling_metadata.logitsprocs.all
        return bool(
            sampling_metadata.generators
            or (sampling_metadata.max_num_logprobs is not None and self.shipped.is_processed_logprobs_mode)
            or any(type(one).__name__ not in _ACTIVE for one in processors)
        )

    def _processed(self, metadata: Any, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        """Return the logits with all changes to individual logits; the same tensor if there are none."""
        if not _changes_logits(sampling_metadata):
            return logits
        processed = logits.to(torch.float32, copy=True)
        bonus = self.shipped.sampler.apply_logits_processors(
            processed[metadata.bonus_logits_indices], sampling_metadata, True
        )
        target = self.shipped.apply_logits_processors(
            processed[metadata.target_logits_indices], sampling_metadata, metadata
        )
        processed[metadata.bonus_logits_indices] = bonus
        processed[metadata.target_logits_indices] = target
        return processed


# Whether vLLM's own logits processors change any logit that is kept. min-p never does.
_ACTIVE: dict[str, Callable[[Any], bool]] = {
    "MinPLogitsProcessor": lambda _: False,
    "LogitBiasLogitsProcessor": lambda one: bool(one.biases),
    "MinTokensLogitsProcessor": lambda one: bool(one.min_toks),
}


def _changes_logits(sampling_metadata: Any) -> bool:
    budgets = sampling_metadata.thinking_budget_state_holder
    return bool(
        not sampling_metadata.no_penalties
        or sampling_metadata.bad_words_token_ids
        or sampling_metadata.allowed_token_ids_mask is not None
        or (budgets is not None and budgets.has_tracked_requests())
        or any(_ACTIVE[type(one).__name__](one) for one in sampling_metadata.logitsprocs.all)
    )


def _sampling(sampling_metadata: Any, requests: int, device: torch.device) -> Sampling:
    """Return vLLM's settings of a batch, with random seeds: seeded requests never come here."""
    temperature = sampling_metadata.temperature
    if temperature is None:  # all are greedy
        temperature = torch.zeros(requests, device=device)
    return Sampling(
        temperature,
        torch.randint(_SEEDS, (requests,), dtype=torch.int64, device=device),
        top_k=sampling_metadata.top_k,
        top_p=sampling_metadata.top_p,
        min_p=next(
            (
                one.min_p.flatten()
                for one in sampling_metadata.logitsprocs.all
                if type(one).__name__ == "MinPLogitsProcessor" and one.min_p_count
            ),
            None,
        ),
    )
