"""Make a step that drafts nothing as cheap on a CPU as a step without speculation.

When "auto" drafts 0 tokens, vLLM still runs the drafter, whose KV must not have holes, and the rejection
sampler: 40 % of a step's time with the demo model on one core. Here the drafter's pass is deferred: a step
with one token per request keeps the drafter's inputs, and one pass runs over all of them when drafts are
wanted, when prompts arrive, or after `_STEPS` steps. Drafts are verified anyway, so a lost pass changes no
output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from baton.services.engine.patches.replace import replaces

_STEPS = 16
_BACKLOG = "_baton_backlog"  # attribute of a model runner


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs")
def _prepare(original: Any, self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
    """Keep a step without drafts out of the rejection sampler, to which speculative_config would send it."""
    spec = self.speculative_config
    if spec is None or scheduler_output.scheduled_spec_decode_tokens or not _can_wait(self):
        return original(self, scheduler_output, num_scheduled_tokens)
    self.speculative_config = None
    try:
        return original(self, scheduler_output, num_scheduled_tokens)
    finally:
        self.speculative_config = spec


def _can_wait(runner: Any) -> bool:
    # With a hybrid target vLLM treats a step without drafts as a speculative one: its state is elsewhere.
    return not runner.use_async_scheduling and not runner.model_config.is_hybrid


@replaces("vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids")
def _propose(  # noqa: PLR0917 (vLLM's parameters)
    original: Any,
    self: Any,
    scheduler_output: Any,
    sampled_token_ids: Any,
    sampling_metadata: Any,
    hidden_states: Any,
    sample_hidden_states: Any,
    aux_hidden_states: Any,
    spec_decode_metadata: Any,
    common_attn_metadata: Any,
    slot_mappings: Any,
) -> Any:
    backlog = _backlog_of(self)
    if backlog is not None:
        if _drafts_nothing(self, scheduler_output) and not backlog.full:
            states = getattr(self.get_model(), "get_mtp_target_hidden_states", lambda: None)()
            if states is None:
                states = hidden_states if aux_hidden_states is None else aux_hidden_states
            return backlog.add(self, states, common_attn_metadata.slot_mapping)
        backlog.expect(self.input_batch.req_ids)
    return original(
        *(self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states),
        *(aux_hidden_states, spec_decode_metadata, common_attn_metadata, slot_mappings),
    )


def _drafts_nothing(runner: Any, scheduler_output: Any) -> bool:
    """Return whether the step made one token per request and the next step verifies no drafts."""
    batch = runner.input_batch
    rows = batch.num_reqs
    if scheduler_output.num_spec_tokens_to_schedule or scheduler_output.total_num_scheduled_tokens != rows:
        return False
    # A prefill's last step may be followed by a handoff, which includes the drafter's KV.
    return bool((batch.num_computed_tokens_cpu[:rows] >= batch.num_prompt_tokens[:rows]).all())


def _backlog_of(runner: Any) -> Backlog | None:
    if not hasattr(runner, _BACKLOG):
        setattr(runner, _BACKLOG, _new_backlog(runner))
    backlog: Backlog | None = getattr(runner, _BACKLOG)
    return backlog


def _new_backlog(runner: Any) -> Backlog | None:
    """Return a new backlog, or None if the drafter does not use the target's hidden state of each token."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    drafter = runner.drafter
    if (
        not _can_wait(runner)
        or not isinstance(drafter, EagleProposer)
        or not drafter.pass_hidden_states_to_model
        or drafter.needs_extra_input_slots
        or runner.uses_mrope
    ):
        return None
    return Backlog(drafter)


class Backlog:
    """Deferred inputs of one rank's drafter. All tensors are on the CPU."""

    def __init__(self, drafter: Any) -> None:
        self._most = drafter.max_num_tokens  # per pass
        self._propose = drafter.propose
        drafter.propose = self._catch_up
        self._steps: list[tuple[Any, Any, Any, Any]] = []  # tokens, positions, states, slots, by row
        self._rows: dict[str, list[int]] = {}  # each request's rows, numbered across all steps
        self._count = 0
        self._batch: Sequence[str] = ()

    @property
    def full(self) -> bool:
        return len(self._steps) >= _STEPS or 2 * self._count > self._most

    def add(self, runner: Any, states: Any, slots: Any) -> Any:
        """Store a step's inputs for a later pass. Return the step's empty drafts, a tensor [rows, 0]."""
        import torch

        rows = runner.input_batch.num_reqs
        kept = torch.cat([one[:rows] for one in states], -1) if isinstance(states, list) else states[:rows]
        tokens, positions = runner.input_ids.gpu[:rows], runner.positions[:rows]
        self._steps.append((tokens.clone(), positions.clone(), kept.clone(), slots[:rows].clone()))
        for row, request in enumerate(runner.input_batch.req_ids):
            self._rows.setdefault(request, []).append(self._count + row)
        self._count += rows
        return torch.empty(rows, 0, dtype=torch.int64)

    def expect(self, requests: Sequence[str]) -> None:
        """Prepare for a pass over the new tokens of these requests, in this order."""
        self._batch = requests

    def _catch_up(
        self,
        *,
        target_token_ids: Any,
        target_positions: Any,
        target_hidden_states: Any,
        token_indices_to_sample: Any,
        common_attn_metadata: Any,
        **others: Any,
    ) -> Any:
        if self._steps and self._count + target_token_ids.shape[0] <= self._most:
            import torch

            metadata = common_attn_metadata
            new = (target_token_ids, target_positions, target_hidden_states, metadata.slot_mapping)
            together = [torch.cat([step[part] for step in self._steps] + [new[part]]) for part in range(4)]
            order, starts = self._order(together[1], metadata.query_start_loc_cpu)
            tokens, positions, states, slots = (part[order] for part in together)
            if token_indices_to_sample is not None:  # the rows to draft from have moved
                moved = (starts - metadata.query_start_loc_cpu)[1:]
                token_indices_to_sample = token_indices_to_sample + moved
            target_token_ids, target_positions, target_hidden_states = tokens, positions, states
            common_attn_metadata = dataclasses.replace(
                metadata,
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                num_actual_tokens=len(order),
                max_query_len=int((starts[1:] - starts[:-1]).max()),
                slot_mapping=slots,
            )
        self._forget()
        return self._propose(
            target_token_ids=target_token_ids,
            target_positions=target_positions,
            target_hidden_states=target_hidden_states,
            token_indices_to_sample=token_indices_to_sample,
            common_attn_metadata=common_attn_metadata,
            **others,
        )

    def _order(self, positions: Any, starts: Any) -> tuple[Any, Any]:
        """Return the rows of old and new tokens in the order of the pass, and where each request begins."""
        import torch

        old, order, begins = positions.tolist(), [], [0]
        bounds = starts.tolist()
        for request, first, end in zip(self._batch, bounds, bounds[1:], strict=False):
            late = self._rows.get(request, [])
            # Otherwise the request has been preempted since, and is recomputed or continues elsewhere.
            if late and old[late[-1]] + 1 == old[self._count + first]:
                order += late
            order += range(self._count + first, self._count + end)
            begins.append(len(order))
        return torch.tensor(order), torch.tensor(begins, dtype=starts.dtype)

    def _forget(self) -> None:
        self._steps.clear()
        self._rows.clear()
        self._count = 0
