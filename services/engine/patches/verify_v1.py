"""Verify drafts by baton.kernels.verify instead of vLLM's rejection samplers, with `verifier: baton`.

This is for model runner V1, the only one on CPU; verify_v2.py is for V2. vLLM applies what changes single
logits (penalties, bad words, allowed tokens, biases, thinking budgets); if nothing does, the kernel gets the
model's logits unchanged. Temperature, min-p, top-k and top-p are the kernel's. It samples all rows, including
the one behind the drafts, which vLLM samples separately.

Some steps stay with vLLM's standard method, whose outputs have the same distribution: steps with seeded
requests (vLLM's generators must keep giving the same tokens whether or not other requests are speculated),
with log-probabilities of processed logits (which are never computed here), and with logits processors that
are not vLLM's own.

Leans on: vllm.v1.worker.gpu_model_runner.GPUModelRunner (`__init__` makes rejection_sampler where it drafts,
and it is called with metadata, draft_probs, logits, sampling_metadata);
vllm.v1.sample.rejection_sampler.RejectionSampler (apply_logits_processors gives target logits [drafts, V],
and may write into what it got; _get_logprobs_tensors; is_processed_logprobs_mode, synthetic_mode, sampler);
vllm.v1.sample.sampler.Sampler.apply_logits_processors (for the rows behind the drafts);
vllm.v1.sample.metadata.SamplingMetadata and vllm.v1.spec_decode.metadata.SpecDecodeMetadata (their fields; a
request's rows of logits lie together, the one behind its drafts last, and cu_num_sampled_tokens tells where
they end); vllm.v1.sample.logits_processor.{MinPLogitsProcessor (min_p_count, min_p [R, 1]),
LogitBiasLogitsProcessor (biases), MinTokensLogitsProcessor (min_toks)}, all of `logitsprocs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from baton.kernels.verify import DraftedTokens, Method, Sampling, verify
from baton.services.engine.patches.replace import replace
from baton.services.engine.patches.signatures import INIT
from baton.services.engine.rank_settings import settings_of
from baton.services.errors import StartError

_SEEDS = 1 << 62


def install() -> None:
    """Patch vLLM in this process; a second call does nothing. Raises StartError for another vLLM.

    An engine with this setting then verifies with our kernel. Making one raises StartError if a symbol
    differs from what we lean on.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(GPUModelRunner, "__init__", _seating, INIT)


def method_of(vllm_config: Any) -> Method | None:
    """Return our kernel's method of verification; None if vLLM verifies."""
    spec = settings_of(vllm_config)
    return None if spec is None or spec.verifier != "baton" else spec.rejection_sample_method


def _seating(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, device: Any) -> None:
        original(self, vllm_config, device)
        method = method_of(vllm_config)
        if method is not None and hasattr(self, "rejection_sampler"):
            check_symbols()
            self.rejection_sampler = Verifier(self.rejection_sampler, method)

    return __init__


def check_symbols() -> None:
    """Raise StartError if a symbol of vLLM's differs from what this module leans on."""
    from vllm.v1.sample.logits_processor import builtin
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    require(RejectionSampler, "forward", "metadata", "draft_probs", "logits", "sampling_metadata")
    require(RejectionSampler, "apply_logits_processors", "logits", "sampling_metadata", "metadata")
    require(
        RejectionSampler,
        "_get_logprobs_tensors",
        *("max_num_logprobs", "metadata", "logits", "target_logits", "bonus_logits", "sampled_token_ids"),
    )
    require(Sampler, "apply_logits_processors", "logits", "sampling_metadata", "predict_bonus_token")
    for name in ("MinPLogitsProcessor", "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor"):
        if not hasattr(builtin, name):
            raise other_vllm(f"{builtin.__name__}.{name}")
    for owner, names in (
        (
            SamplingMetadata,
            "temperature all_greedy top_p top_k generators max_num_logprobs no_penalties "
            "allowed_token_ids_mask bad_words_token_ids logitsprocs thinking_budget_state_holder",
        ),
        (
            SpecDecodeMetadata,
            "draft_token_ids num_draft_tokens cu_num_sampled_tokens target_logits_indices "
            "bonus_logits_indices",
        ),
    ):
        missing = set(names.split()) - {field.name for field in fields(owner)}
        if missing:
            raise other_vllm(f"{owner.__name__}.{', '.join(sorted(missing))}")


def require(owner: Any, name: str, *parameters: str) -> None:
    """Check that a method takes these parameters and no others. Raises StartError if not."""
    function = getattr(owner, name, None)
    if function is None or tuple(inspect.signature(function).parameters) != ("self", *parameters):
        raise other_vllm(f"{owner.__name__}.{name}({', '.join(parameters)})")


def other_vllm(what: str) -> StartError:
    """Return the error for a symbol that this vLLM does not have as we need it."""
    return StartError(
        f"verifier 'baton' leans on vLLM's {what}, which this vLLM does not have: install the vLLM version "
        "that this Baton is made for, or say verifier 'vllm'"
    )


class Verifier:
    """Our verifier in place of a V1 model runner's RejectionSampler, which it keeps for some steps."""

    def __init__(self, shipped: Any, method: Method) -> None:
        self.shipped = shipped
        self.method = method

    def __call__(self, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Verify one step's drafts, which are in `metadata`, by the target's logits [sum(drafts + 1), V]."""
        from vllm.v1.outputs import SamplerOutput

        if self.shipped.synthetic_mode or self._left_to_vllm(sampling_metadata):
            return self.shipped(metadata, draft_probs, logits, sampling_metadata)
        drafts = DraftedTokens(
            metadata.draft_token_ids,
            metadata.cu_num_sampled_tokens,
            metadata.max_spec_len,
            probs=draft_probs,
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
        """Return the logits after everything that vLLM does to single ones; unchanged if that is nothing."""
        if not _changes_logits(sampling_metadata):
            return logits
        processed = logits.to(torch.float32, copy=True)
        behind = self.shipped.sampler.apply_logits_processors(
            processed[metadata.bonus_logits_indices], sampling_metadata, True
        )
        before = self.shipped.apply_logits_processors(
            processed[metadata.target_logits_indices], sampling_metadata, metadata
        )
        processed[metadata.bonus_logits_indices] = behind
        processed[metadata.target_logits_indices] = before
        return processed


# Whether each of vLLM's own logits processors changes any logit now. min-p does not change those it keeps.
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
    """Return vLLM's settings of a batch, with new seeds: steps with V1's generators are left to vLLM."""
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
