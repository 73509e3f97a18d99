"""Make up the tokens that the null GPU does not sample: each position of a sequence has a fixed token.

The token does not depend on where and how it is generated, so tests notice missing and repeated tokens. The
number of accepted drafts also depends on the position. The tokens are copied to the device as soon as a
sampler returns; vLLM does the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

FIRST, KINDS = 65, 26  # the demo model's tokens of letters


def token(place: int) -> int:
    """Return the token at a position, counted from the beginning of the prompt."""
    return FIRST + place % KINDS


def taken(place: int, drafts: int) -> int:
    """Return how many tokens a step at a position gives: some of the drafts and one more."""
    return 1 + place % (drafts + 1)


def on_v2(module: ModuleType) -> None:
    runner, output = module.GPUModelRunner, module.AsyncOutput
    execute_model = runner.execute_model
    lengths: dict[str, int] = {}  # request -> tokens of its sequence so far
    drafts: dict[str, int] = {}  # request -> drafts in this step, if its prompt is complete

    def execute(self: Any, scheduled: Any, *rest: Any, **named: Any) -> Any:
        for request in scheduled.finished_req_ids:
            lengths.pop(request, None)
        drafts.clear()
        computed = {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
        for one in scheduled.scheduled_new_reqs:
            lengths[one.req_id] = len(one.prefill_token_ids or one.prompt_token_ids or ())
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, count in scheduled.num_scheduled_tokens.items():
            if request in lengths and computed[request] + count >= lengths[request]:
                drafts[request] = len(scheduled.scheduled_spec_decode_tokens.get(request, ()))
        return execute_model(self, scheduled, *rest, **named)

    class Output(output):  # type: ignore[misc, valid-type]
        """Copies the made-up tokens to the device before vLLM copies them back."""

        def __init__(
            self, model_runner_output: Any, sampler_output: Any, num_sampled_tokens: Any, **named: Any
        ) -> None:
            rows = []
            for request in model_runner_output.req_ids:
                count = taken(lengths[request], drafts[request]) if request in drafts else 0
                rows.append([token(lengths[request] + i) for i in range(count)])
                lengths[request] = lengths.get(request, 0) + count
            _give(sampler_output, rows, 0)
            _write(num_sampled_tokens, [[len(row)] for row in rows], 0)
            super().__init__(model_runner_output, sampler_output, num_sampled_tokens, **named)

    runner.execute_model, module.AsyncOutput = execute, Output  # type: ignore[attr-defined]


def on_v1(module: ModuleType) -> None:
    import torch

    runner = module.GPUModelRunner
    bookkeeping, propose = runner._bookkeeping_sync, runner.propose_draft_token_ids

    def keep(self: Any, scheduler_output: Any, sampler_output: Any, *rest: Any, **named: Any) -> Any:
        rows = []
        for row, request in enumerate(self.input_batch.req_ids):
            place = int(self.input_batch.num_tokens_no_spec[row])
            drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request, ()))
            rows.append([token(place + i) for i in range(taken(place, drafts))])
        # int64, like the memory that it is copied to: a conversion would need a kernel.
        sampler_output.sampled_token_ids = torch.zeros_like(
            sampler_output.sampled_token_ids, dtype=torch.int64
        )
        _give(sampler_output, rows, -1)
        return bookkeeping(self, scheduler_output, sampler_output, *rest, **named)

    @functools.wraps(propose)
    def draft(self: Any, *rest: Any, **named: Any) -> Any:
        made = propose(self, *rest, **named)
        if isinstance(made, torch.Tensor):  # no kernel has filled it
            made = torch.full(made.shape, FIRST, dtype=made.dtype).to(made.device)
        return made

    runner._bookkeeping_sync, runner.propose_draft_token_ids = keep, draft


def _give(sampler_output: Any, rows: list[list[int]], fill: int) -> None:
    """Write tokens into a sampler's output and, without drafts, into its log-probabilities."""
    _write(sampler_output.sampled_token_ids, rows, fill)
    told = sampler_output.logprobs_tensors
    if told is not None and told.logprob_token_ids.shape[0] == len(rows):
        width = told.logprob_token_ids.shape[1]
        _write(told.logprob_token_ids, [row[:1] * width for row in rows], 0)


def _write(target: Any, rows: Iterable[list[int]], fill: int) -> None:
    """Copy rows, padded, into a tensor on the device."""
    import torch

    values = torch.full(target.shape, fill, dtype=target.dtype)
    flat = values.view(target.shape[0], -1)
    for row, found in enumerate(rows):
        flat[row, : len(found)] = torch.tensor(found, dtype=target.dtype)
    target.copy_(values)
