"""Run our proposers in vLLM's model runner V1, to draft from tokens alone or to continue a model's drafts.

A method that drafts from tokens alone runs as vLLM's `custom_class`, with `Seat` as the drafter. A hybrid
looks for long matches, runs vLLM's own drafter for `num_model_steps` tokens (one if nearly all requests have
a long match), and extends those drafts. vLLM gets a list per request. Drafts are written after a
request's tokens in `token_ids_cpu`, as vLLM's scheduled drafts are; the next step overwrites them before it
reads any of them.

Only V1 without asynchronous scheduling takes lists; drafts_v2.py is for V2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.services.decode.proposers import registry
from baton.services.decode.proposers.drafting import DraftBatch, Ints, Proposer
from baton.services.decode.proposers.hybrid import Hybrid
from baton.services.engine.patches.replace import replaces
from baton.services.engine.rank_settings import settings_of
from baton.services.errors import StartError

# GPUModelRunner.propose_draft_token_ids. It gets the sampled tokens as a tensor before the bookkeeping if the
# drafter runs a model, and as lists after it otherwise.
PROPOSE_DRAFT_TOKEN_IDS = (
    *("self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states"),
    *("sample_hidden_states", "aux_hidden_states", "spec_decode_metadata"),
    *("common_attn_metadata", "slot_mappings"),
)
_DESK = "_baton_desk"  # attribute of a model runner


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__")
def _add_desk(original: Any, self: Any, vllm_config: Any, device: Any) -> None:
    original(self, vllm_config, device)
    setattr(self, _DESK, _desk_of(self, vllm_config))


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model")
def _forget_finished(
    original: Any, self: Any, scheduler_output: Any, intermediate_tensors: Any = None
) -> Any:
    desk: Desk | None = getattr(self, _DESK)
    if desk is not None and scheduler_output.finished_req_ids:
        desk.proposer.forget(sorted(scheduler_output.finished_req_ids))
    return original(self, scheduler_output, intermediate_tensors)


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids", *PROPOSE_DRAFT_TOKEN_IDS)
def _draft(original: Any, self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any) -> Any:
    desk: Desk | None = getattr(self, _DESK)
    if desk is None:
        return original(self, scheduler_output, sampled_token_ids, *args)
    wanted = scheduler_output.num_spec_tokens_to_schedule

    def model(tokens: int) -> Any:
        scheduler_output.num_spec_tokens_to_schedule = tokens
        try:
            return original(self, scheduler_output, sampled_token_ids, *args)
        finally:
            scheduler_output.num_spec_tokens_to_schedule = wanted

    return desk.draft(self, sampled_token_ids, model, wanted)


def _desk_of(runner: Any, vllm_config: Any) -> Desk | None:
    spec = settings_of(vllm_config)
    if spec is None or not hasattr(runner, "drafter"):
        return None
    proposer = registry.method(spec.method).proposer(spec, vllm_config)
    if proposer is None:
        return None
    if runner.use_async_scheduling:
        raise StartError(
            f"engine.speculative_config.mtp_strategy (value {spec.mtp_strategy!r}): matches are made on the "
            "host from the tokens just generated; set engine.extra.async_scheduling false, "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    return Desk(proposer, runner.max_num_reqs)


class Desk:
    """One rank's proposer, and the arrays that it shares with the model runner and reuses in each step."""

    def __init__(self, proposer: Proposer, rows: int) -> None:
        self.proposer = proposer
        self._settled: Ints = np.zeros(rows, dtype=np.int32)
        self._lengths: Ints = np.zeros(rows, dtype=np.int32)
        self._limits: Ints = np.zeros(rows, dtype=np.int32)

    def draft(self, runner: Any, sampled: Any, model: Callable[[int], Any], wanted: int) -> list[list[int]]:
        """Return the drafts of each row, at most `wanted`.

        sampled: this step's tokens; a tensor [rows, 1 + drafts] with -1 for rejected ones if they are not in
        the batch yet, else lists. model: runs a hybrid's draft model for n tokens and returns them, [rows,
        n].
        """
        batch = self._batch(runner, sampled, wanted)
        if isinstance(self.proposer, Hybrid):
            return _with_model(self.proposer, batch, model, wanted)
        found = self.proposer.propose(batch)
        # A proposer of another package may ignore its limits.
        return _lists(found.tokens, np.minimum(found.counts, batch.limits))

    def _batch(self, runner: Any, sampled: Any, wanted: int) -> DraftBatch:
        batch = runner.input_batch
        rows = batch.num_reqs
        tokens: Ints = batch.token_ids_cpu[:rows]  # [rows, max_model_len]
        settled, lengths, limits = self._settled[:rows], self._lengths[:rows], self._limits[:rows]
        settled[:] = batch.num_tokens_no_spec[:rows]
        prefilling = runner.discard_request_mask.np[:rows]  # rows whose prompt is not complete yet
        if not isinstance(sampled, list):
            _append(tokens, settled, _sampled(sampled, prefilling, batch.vocab_size))
        # The last position is for the token that the target adds.
        np.clip(runner.max_model_len - 1 - settled, 0, wanted, out=limits)
        limits[prefilling] = 0
        lengths[:] = settled
        return DraftBatch(batch.req_ids, tokens, batch.num_prompt_tokens[:rows], settled, lengths, limits)


def _with_model(
    hybrid: Hybrid, batch: DraftBatch, model: Callable[[int], Any], wanted: int
) -> list[list[int]]:
    """Return each row's long match, or else the draft model's tokens followed by a match."""
    if not wanted:
        model(0)  # the draft model runs in every step, or its KV would have holes
        hybrid.propose(batch)
        return [[] for _ in batch.request_ids]
    long = hybrid.long_matches(batch)
    matched = long.counts > 0
    passes = hybrid.passes(int((batch.limits > 0).sum()), int(matched.sum()))
    made: npt.NDArray[np.int64] = model(min(wanted, passes)).cpu().numpy()
    batch.limits[matched] = 0
    kept = np.arange(made.shape[1], dtype=np.int32) < batch.limits[:, None]
    _append(batch.tokens, batch.lengths, np.where(kept, made, -1))
    count = batch.lengths - batch.settled  # number of the model's drafts
    np.subtract(batch.limits, count, out=batch.limits)
    found = hybrid.propose(batch)
    more = np.minimum(found.counts, batch.limits)
    parts = (_lists(*part) for part in ((long.tokens, long.counts), (made, count), (found.tokens, more)))
    return [match + model_made + continued for match, model_made, continued in zip(*parts, strict=True)]


def _sampled(sampled: Any, prefilling: npt.NDArray[np.bool_], vocabulary: int) -> npt.NDArray[np.int32]:
    """Return a step's tokens [rows, 1 + drafts], with -1 for none, like RejectionSampler.parse_output."""
    values: npt.NDArray[np.int32] = sampled.cpu().numpy()
    return np.where((values >= 0) & (values < vocabulary) & ~prefilling[:, None], values, np.int32(-1))


def _append(tokens: Ints, lengths: Ints, more: npt.NDArray[Any]) -> None:
    """Append the tokens of `more` [rows, n] that are not -1 to each row, and increase `lengths`."""
    real = more >= 0
    row, column = np.nonzero(real)
    place = lengths[row] + np.cumsum(real, axis=1)[row, column] - 1
    tokens[row, place] = more[row, column]
    lengths += real.sum(axis=1, dtype=np.int32)


def _lists(tokens: npt.NDArray[Any], counts: Ints) -> list[list[int]]:
    return [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
