"""Match n-grams on the GPU, for `ngram` and the hybrid, on vLLM's model runner V2.

V2 drafts before the host knows a step's tokens: it calls its speculator's `propose` once they are in the
requests' states on the device, and gets a tensor [requests, num_speculative_tokens]. `Matching` replaces that
method. In a hybrid, vLLM's own speculator runs first, in every step, for `num_model_steps` tokens; then
`baton.kernels.ngram_match` writes long matches over the model's tokens, and other matches after them.
Verification treats a matched token as a draft of probability 1, like the model's.

The host decides how many drafts of a row are verified. Without asynchronous scheduling (always for `ngram`)
it waits for a step's tokens anyway, so each row's number of drafts is copied to it, and the lists are cut.
With it, the next step is scheduled first: a row that matches do not fill repeats its last draft, which is
verified and rejected; `num_speculative_tokens: auto` then drafts fewer. A marker cannot shorten a row,
because drafts are the model's input. vLLM's adaptive verification judges drafts by logits, which a match does
not have.

V2 keeps the sequences, [max_num_seqs, max_model_len], in the host's memory except for `ngram`. Here they are
moved to the device, at 4 bytes per token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from baton.kernels.ngram_match import new_workspace, ngram_match
from baton.services.decode.proposers.hybrid import model_steps, ngram_sizes
from baton.services.engine.patches.draft_length import lengths_by_batch
from baton.services.engine.patches.replace import check, replaces
from baton.services.engine.rank_settings import settings_of
from baton.services.errors import StartError
from baton.services.speculation import SpeculativeSettings

_PROPOSE = (
    *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
    *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
    *("dp_sync_state", "dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile"),
    "num_speculative_tokens",
)

Sizes = tuple[int, int]  # the shortest and the longest n-gram


def install() -> None:
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    check(BaseSpeculator, "propose", _PROPOSE)


@replaces("vllm.v1.worker.gpu.model_runner:init_speculator")
def _init_speculator(original: Any, vllm_config: Any, device: Any, req_states: Any) -> Any:
    spec = settings_of(vllm_config)
    if spec is not None and spec.mtp_strategy == "with_suffix":
        raise StartError(
            f"engine.speculative_config.mtp_strategy (value {spec.mtp_strategy!r}): suffixes are matched on "
            "the host, for which vLLM's model runner V2 does not wait: say 'with_ngram', or set "
            "engine.extra.async_scheduling false, VLLM_USE_V2_MODEL_RUNNER=0"
        )
    speculator = original(vllm_config, device, req_states)
    if spec is None:
        return speculator
    cut = not vllm_config.scheduler_config.async_scheduling
    if spec.mtp_strategy == "with_ngram":
        speculator.propose = _hybrid(speculator, spec, vllm_config, req_states, cut)
    elif vllm_config.speculative_config.use_ngram():
        theirs = vllm_config.speculative_config
        sizes = (theirs.prompt_lookup_min, theirs.prompt_lookup_max)
        drafts = torch.zeros(req_states.max_num_reqs, spec.limit, dtype=torch.int64, device=device)
        speculator.propose = Matching(req_states, drafts, then=sizes, cut=cut)
    return speculator


def _hybrid(
    speculator: Any, spec: SpeculativeSettings, vllm_config: Any, req_states: Any, cut: bool
) -> Matching:
    if speculator.draft_logits is not None:
        raise StartError(
            "vLLM's draft_sample_method 'probabilistic' wants a distribution of each draft, and a match has "
            "none: leave it at 'greedy' with mtp_strategy 'with_ngram'"
        )
    _move_sequences(req_states)
    steps = model_steps(spec)
    _capture_for(speculator, vllm_config, steps, adaptive=spec.adaptive)
    first, then = ngram_sizes(spec)
    return Matching(
        req_states,
        speculator.draft_tokens,
        first=first,
        then=then,
        model=speculator.propose,
        steps=steps,
        cut=cut,
    )


def _move_sequences(req_states: Any) -> None:
    """Move the sequences to the device, as V2 does for ngram: 256 of 32 k tokens over PCIe take 0.6 ms."""
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    shape = (req_states.max_num_reqs, req_states.max_model_len)
    req_states.all_token_ids = StagedWriteTensor(shape, dtype=torch.int32, device=req_states.device)


def _capture_for(speculator: Any, vllm_config: Any, steps: int, *, adaptive: bool) -> None:
    """Capture the draft model's CUDA graph for the tokens that the model drafts, not for all drafts."""
    narrow = copy.copy(vllm_config)
    narrow.speculative_config = copy.copy(vllm_config.speculative_config)
    narrow.speculative_config.num_speculative_tokens = steps
    if narrow.speculative_config.num_speculative_tokens_per_batch_size is not None:
        most = vllm_config.scheduler_config.max_num_seqs
        narrow.speculative_config.num_speculative_tokens_per_batch_size = lengths_by_batch(
            steps, most, adaptive=adaptive
        )
    original = speculator.init_cudagraph_manager

    def init_cudagraph_manager(cudagraph_mode: Any) -> None:
        original(cudagraph_mode)
        manager = getattr(speculator, "decode_cudagraph_manager", None)  # absent with several MTP modules
        if manager is not None:
            manager.vllm_config = narrow

    speculator.init_cudagraph_manager = init_cudagraph_manager


@replaces("vllm.v1.worker.gpu.model_runner:GPUModelRunner.take_draft_token_ids")
def _cut(original: Any, self: Any) -> Any:
    taken = original(self)
    propose: Any = getattr(self.speculator, "propose", None)
    matching = inspect.unwrap(propose)  # step_times has wrapped it
    if taken is not None and isinstance(matching, Matching):
        for drafts, count in zip(taken.draft_token_ids, matching.counts(), strict=False):
            del drafts[count:]
    return taken


class Matching:
    """Replaces a speculator's `propose`: runs the draft model, if there is one, and adds matches."""

    def __init__(
        self,
        req_states: Any,
        drafts: torch.Tensor,
        *,
        then: Sizes,
        first: Sizes | None = None,
        model: Callable[..., Any] | None = None,
        steps: int = 0,
        cut: bool,
    ) -> None:
        """Allocate the arrays, and compile the kernel so that no request waits for it.

        drafts: [requests, most] int64, of which `propose` returns a part; the model drafts the first `steps`.
        first: sizes of the n-grams whose matches replace the model's tokens. then: sizes of the n-grams whose
        matches continue them. cut: whether the host needs `counts`.
        """
        self._states = req_states
        self._drafts = drafts
        self._first = first
        self._then = then
        self._model = model
        self._steps = steps
        rows, device = drafts.shape[0], drafts.device
        self._workspace = new_workspace(rows, device)
        self._long = torch.zeros(rows, dtype=torch.int32, device=device)
        self._more = torch.zeros(rows, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(rows, dtype=torch.int32, pin_memory=on_gpu) if cut else None
        self._copied = torch.cuda.Event() if cut and on_gpu else None
        self._requests = 0  # how many requests have their counts in self._host
        if on_gpu:
            nothing = torch.zeros(1, dtype=torch.int32, device=device)
            self._match(nothing.long(), nothing, steps, drafts.shape[1])

    def __call__(  # noqa: PLR0917 (as vLLM calls it)
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft like BaseSpeculator.propose: [requests, most], with num_speculative_tokens valid columns."""
        most = self._drafts.shape[1]
        wanted = most if num_speculative_tokens is None else num_speculative_tokens
        made = min(wanted, self._steps)
        drafts = self._drafts[: input_batch.num_reqs]
        if self._model is not None:
            # The draft model runs even for 0 tokens, or its KV would have holes.
            self._model(
                *(input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states),
                *(num_sampled, num_rejected, last_sampled, *args),
                dummy_run=dummy_run,
                num_speculative_tokens=made,
                **kwargs,
            )
        if dummy_run:
            return drafts
        rows = input_batch.idx_mapping
        limits = self._limits(rows, num_sampled, wanted)
        if wanted > made:  # pad with valid tokens, which matches then overwrite
            drafts[:, made:] = drafts[:, made - 1 : made] if made else last_sampled.view(-1)[rows, None]
        if wanted:
            self._match(rows, limits, made, wanted)
        if self._host is not None:
            self._send_counts(self._host, limits, made, wanted)
        return drafts

    def _limits(self, rows: torch.Tensor, num_sampled: torch.Tensor, wanted: int) -> torch.Tensor:
        """Return each request's maximum drafts: 0 during its prefill; the last position is the target's."""
        free = self._states.max_model_len - 1 - self._states.total_len.gpu[rows]
        return free.clamp_(0, wanted).mul_(num_sampled > 0)

    def _match(self, rows: torch.Tensor, limits: torch.Tensor, made: int, wanted: int) -> None:
        requests = limits.shape[0]
        drafts, long, more = self._drafts[:requests], self._long[:requests], self._more[:requests]
        sequences = (self._states.all_token_ids.gpu, self._states.total_len.gpu)
        where = {"rows": rows, "workspace": self._workspace}
        if self._first is not None:
            low, high = self._first
            ngram_match(*sequences, limits, drafts, long, min_n=low, max_n=high, **where)
        if wanted > made:
            low, high = self._then
            rest = torch.where(long > 0, 0, limits - made)
            tails = drafts[:, :made] if made else None
            ngram_match(*sequences, rest, drafts[:, made:], more, min_n=low, max_n=high, tails=tails, **where)

    def _send_counts(self, host: torch.Tensor, limits: torch.Tensor, made: int, wanted: int) -> None:
        requests = limits.shape[0]
        counts = limits.clamp(max=made)
        if wanted > made:
            counts += self._more[:requests]
        if self._first is not None and wanted:
            counts = torch.maximum(counts, self._long[:requests])
        self._requests = requests
        host[:requests].copy_(counts, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def counts(self) -> list[int]:
        """Wait for and return the number of drafts of each request in the last batch; [] without `cut`."""
        if self._host is None:
            return []
        if self._copied is not None:
            self._copied.synchronize()
        counts: list[int] = self._host[: self._requests].tolist()
        return counts
