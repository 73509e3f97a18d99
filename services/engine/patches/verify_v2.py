"""Verify drafts with our kernel on vLLM's model runner V2, the GPU's default; verify_v1.py is for V1.

V2's sampler keeps settings in arrays by slot, which the kernel reads directly. It also reads the logits that
V2's drafters keep. Logits are copied to float32 only if something changes individual logits. Features that
need values never computed here stay with vLLM: watermarks, synthetic acceptance, processed log-probabilities,
masks.

RejectionSampler._verify gets logits [N, V], draft_logits [slots, steps, V], cu_num_logits [R + 1], and
verify_draft_sampled [N], each row's input token: first the token before a request's drafts, then its drafts.
It returns processed logits, tokens [R, steps + 1] int64 and their counts, int32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from baton.kernels.verify import DraftedTokens, Method, Sampling, Verified, verify
from baton.services.engine.patches import verify_v1
from baton.services.engine.patches.replace import check, replaces

_VERIFY = (
    *("self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping"),
    *("idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np"),
    "verify_draft_sampled",
)


def install() -> None:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    check(RejectionSampler, "_verify", _VERIFY)


@replaces(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
    *("self", "load_dummy_weights", "args", "model", "kwargs"),
)
def _load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    done = original(self, *args, **kwargs)
    method = verify_v1.method_of(self.vllm_config)
    if method is not None and self.rejection_sampler is not None and seat(self.rejection_sampler, method):
        compile_kernels(self, method)
    return done


def seat(shipped: Any, method: Method) -> bool:
    """Have this RejectionSampler verify with our kernel. Return False if it does more than the kernel can."""
    from vllm.config.model import PROCESSED_LOGPROBS_MODES
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    if type(shipped) is not RejectionSampler:
        return False  # a model's own sampler
    sampler = shipped.sampler
    if (
        shipped.watermark_key is None
        and shipped.synthetic_conditional_rates is None
        and not sampler.return_sampling_mask
        and sampler.logprobs_mode not in PROCESSED_LOGPROBS_MODES
    ):
        shipped._verify = functools.partial(_verify, shipped, method)
        return True
    return False


def _verify(  # noqa: PLR0917 (as vLLM calls it)
    shipped: Any,
    method: Method,
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    pos: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    idx_mapping_np: Any,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    seq_lens_upper_bound_np: Any,
    verify_draft_sampled: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sampler = shipped.sampler
    processed = logits
    if _changes_logits(sampler, idx_mapping_np):
        from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

        context = LogitsContext(
            expanded_idx_mapping=expanded_idx_mapping,
            idx_mapping=idx_mapping,
            idx_mapping_np=idx_mapping_np,
            expanded_local_pos=expanded_local_pos,
            input_ids=draft_sampled,
            pos=pos,
            seq_lens_upper_bound_np=seq_lens_upper_bound_np,
        )
        processed = logits.to(torch.float32, copy=True)
        for processor in sampler.logits_processors:
            processed = processor.apply(processed, context)
        sampler.thinking_budget_state.apply(processed, context)
    states = sampler.sampling_states
    filtered = any(bool(np.any(one.np[idx_mapping_np] != neutral)) for one, neutral in _filters(states))
    found = _run(
        (shipped, method),
        (processed, draft_logits),
        (verify_draft_sampled, cu_num_logits, pos),
        _sampling(states, idx_mapping, filtered=filtered),
    )
    return processed, found.tokens.long(), found.counts


def _run(
    by: tuple[Any, Method],
    logits: tuple[torch.Tensor, torch.Tensor | None],
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sampling: Sampling,
) -> Verified:
    """Verify drafts. logits: the target's and the drafter's; rows: input tokens, row ends, positions."""
    (shipped, method), (target, drafter), (tokens, ends, positions) = by, logits, rows
    if drafter is not None:  # the vocabularies of target and drafter may be padded differently
        width = min(target.shape[1], drafter.shape[2])
        target, drafter = target[:, :width], drafter[:, :, :width]
    drafts = DraftedTokens(tokens, ends[1:], shipped.num_speculative_steps, logits=drafter)
    return verify(target, drafts, sampling, method=method, positions=positions)


def compile_kernels(runner: Any, method: Method) -> None:
    """Run every variant of the kernels on dummy drafts, because vLLM's warm-up does not cover them all."""
    shipped, device = runner.rejection_sampler, runner.device
    count = shipped.num_speculative_steps + 1
    tokens = torch.zeros(count, dtype=torch.int32, device=device)
    ends = torch.tensor([0, count], dtype=torch.int32, device=device)
    positions = torch.arange(count, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    drafter = getattr(runner.speculator, "draft_logits", None)
    for dtype in dict.fromkeys((runner.dtype, torch.float32)):  # from the model, and after processing
        target = torch.zeros(count, runner.vocab_size, dtype=dtype, device=device)
        for filtered in (False, True):
            sampling = _sampling(shipped.sampler.sampling_states, slots, filtered=filtered)
            _run((shipped, method), (target, drafter), (tokens, ends, positions), sampling)


def _filters(states: Any) -> tuple[tuple[Any, float], ...]:
    """Return the filters, with the value at which each keeps all tokens."""
    return (states.top_k, states.vocab_size), (states.top_p, 1.0), (states.min_p, 0.0)


def _sampling(states: Any, slots: torch.Tensor, *, filtered: bool) -> Sampling:
    """Return the settings of these slots, with all filters or none: Triton compiles each combination anew."""
    top_k, top_p, min_p = (one.gpu if filtered else None for one, _ in _filters(states))
    return Sampling(
        states.temperature.gpu, states.seeds.gpu, top_k=top_k, top_p=top_p, min_p=min_p, slots=slots
    )


# Whether V2's logits processors change any logit of these slots.
_ACTIVE: dict[str, Callable[[Any, Any], bool]] = {
    "PenaltiesState": lambda one, slots: bool(np.any(one.use_penalty[slots])),
    "LogitBiasState": lambda one, slots: bool(np.any(one.use_logit_bias[slots])),
    "BadWordsState": lambda one, slots: bool(np.any(one.num_bad_words.np[slots])),
}


def _changes_logits(sampler: Any, slots: Any) -> bool:
    budgets = sampler.thinking_budget_state
    return bool(budgets.enabled and np.any(budgets.use_thinking_budget[slots])) or any(
        _ACTIVE.get(type(one).__name__, lambda *_: True)(one, slots) for one in sampler.logits_processors
    )
