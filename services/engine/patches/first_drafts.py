"""Hand over the drafts for a decode worker's first step with the prompt.

The step that ends a prompt gives its first token, and the drafter has run over that step, so it can already
say what may follow. vLLM drops such drafts if the request ends there, as every handed-over prompt does, and
its scheduler takes drafts only of running requests: a decode worker's first step would verify nothing.

Here the step that ends such a prompt drafts, if nothing decodes beside it, and the drafts are kept until the
worker's host takes them. At the decode worker they are attached to the request, and scheduled with its first
step if that computes the one token they follow; used or not, they are dropped then. They take what the step's
budget leaves, up to the draft length in force. Verification is exact for any draft, so it does not matter
which drafter made them, or that its probabilities are unknown.

This does not apply to asynchronous scheduling or model runner V2, where drafts stay on the device.

Leans on: vllm.v1.core.sched.scheduler.Scheduler (_update_after_schedule, which it calls last in schedule, and
which reads num_scheduled_tokens; requests, num_spec_tokens, max_num_scheduled_tokens, scheduler_config.
{async_scheduling, max_num_batched_tokens}, max_model_len, use_v2_model_runner, structured_output_manager.
validate_tokens, update_draft_token_ids; new requests are scheduled with allocate_slots), vllm.v1.core.
kv_cache_manager.KVCacheManager.allocate_slots (request and num_new_tokens by position, the rest by keyword;
lookahead tokens are allocated and never cached), SpeculativeConfig.max_num_new_slots_for_drafting,
vllm.v1.request.Request (num_tokens, num_computed_tokens, max_tokens, num_output_tokens), SchedulerOutput
(scheduled_new_reqs, num_scheduled_tokens, total_num_scheduled_tokens, scheduled_spec_decode_tokens,
num_spec_tokens_to_schedule), vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states (takes drafts of
new requests), DraftTokenIds (req_ids, draft_token_ids).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from baton.services.decode.proposers import registry
from baton.services.engine.patches.replace import replace
from baton.services.speculation import SpeculativeSettings

# Most tokens that a draft model drafts for a handoff: each after the first delays the first token by another
# pass.
MOST = 2

ALLOCATE_SLOTS = (
    *("request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks", "num_lookahead_tokens"),
    *("num_external_computed_tokens", "delay_cache_blocks", "num_encoder_tokens", "full_sequence_must_fit"),
    *("reserved_blocks", "has_scheduled_reqs", "skip_zeroing_group_ids"),
)


def want(request: Any) -> None:
    """Request drafts for another worker in the step that ends this request's prompt."""
    request.drafts_wanted = True


def give(request: Any, drafts: Sequence[int]) -> None:
    """Have these drafts, which follow the request's last token, verified in its first step here."""
    request.first_drafts = request.num_tokens, list(drafts)


class FirstDrafts:
    """The seam in a loaded engine's scheduler. For the engine's thread."""

    def __init__(self, scheduler: Any, most: int) -> None:
        """Use drafts that come with requests from now on; draft `most` tokens for those that go elsewhere."""
        self._scheduler = scheduler
        self._most = most
        self._prompts: set[str] = set()  # requests that will go elsewhere, while their prompt is computed
        self._ended: set[str] = set()  # those whose prompt ends in this step
        self._made: dict[str, list[int]] = {}
        replace(scheduler.kv_cache_manager, "allocate_slots", self._with_slots, ALLOCATE_SLOTS)
        replace(scheduler, "_update_after_schedule", self._scheduling, ("scheduler_output",))
        replace(scheduler, "update_draft_token_ids", self._keeping, ("draft_token_ids",))

    def take(self) -> dict[str, list[int]]:
        """Return the drafts for requests that end here with their prompt, by id. Called after every step."""
        made, self._made = self._made, {}
        self._ended.clear()
        return made

    def _with_slots(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **others: Any) -> Any:
            _, drafts = getattr(request, "first_drafts", (0, ()))
            if drafts and num_new_tokens == 1:
                # The drafter writes behind the verified tokens: its own room comes on top.
                room = min(len(drafts), self._scheduler.num_spec_tokens)
                more = others | {"num_lookahead_tokens": others.get("num_lookahead_tokens", 0) + room}
                blocks = allocate(request, num_new_tokens, *args, **more)
                if blocks is not None:
                    return blocks
                del request.first_drafts  # do without drafts instead of waiting for a block
            return allocate(request, num_new_tokens, *args, **others)

        return allocate_slots

    def _scheduling(self, update: Callable[[Any], None]) -> Callable[[Any], None]:
        def _update_after_schedule(scheduler_output: Any) -> None:
            for one in scheduler_output.scheduled_new_reqs:
                request = self._scheduler.requests[one.req_id]
                if getattr(request, "drafts_wanted", False):
                    self._prompts.add(one.req_id)
                at, drafts = request.__dict__.pop("first_drafts", (0, ()))
                if drafts and at == request.num_tokens:
                    self._add(scheduler_output, request, drafts)
            if self._prompts:
                self._draft_at_the_end(scheduler_output)
            update(scheduler_output)

        return _update_after_schedule

    def _add(self, output: Any, request: Any, drafts: list[int]) -> None:
        """Schedule as many of these drafts as there is room for."""
        name, scheduler = request.request_id, self._scheduler
        if output.num_scheduled_tokens[name] != 1 or request.num_computed_tokens + 1 != request.num_tokens:
            return
        most = min(
            output.num_spec_tokens_to_schedule,  # the length in force
            self._budget(output),
            scheduler.max_model_len
            - 1
            - request.num_tokens,  # the last position is for the model's own token
            request.max_tokens - request.num_output_tokens - 1,
        )
        if most <= 0:
            return
        valid = scheduler.structured_output_manager.validate_tokens(request, drafts[:most])
        if valid:
            output.scheduled_spec_decode_tokens[name] = valid
            output.num_scheduled_tokens[name] += len(valid)
            output.total_num_scheduled_tokens += len(valid)

    def _budget(self, output: Any) -> int:
        scheduler = self._scheduler
        spec = scheduler.vllm_config.speculative_config
        slots = spec.max_num_new_slots_for_drafting * len(output.num_scheduled_tokens)
        most = min(
            scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens - slots
        )
        return int(most - output.total_num_scheduled_tokens)

    def _draft_at_the_end(self, output: Any) -> None:
        """Note handed-over requests whose prompts end in this step; have them drafted if nothing decodes."""
        self._prompts -= output.finished_req_ids
        step = {name: self._scheduler.requests[name] for name in output.num_scheduled_tokens}
        for name in self._prompts & step.keys():
            if step[name].num_computed_tokens + output.num_scheduled_tokens[name] == step[name].num_tokens:
                self._ended.add(name)
        self._prompts -= self._ended
        if self._ended and all(one.max_tokens - one.num_output_tokens <= 1 for one in step.values()):
            output.num_spec_tokens_to_schedule = max(output.num_spec_tokens_to_schedule, self._most)

    def _keeping(self, update: Callable[[Any], None]) -> Callable[[Any], None]:
        def update_draft_token_ids(draft_token_ids: Any) -> None:
            if self._ended:
                rows = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=False)
                for name, drafts in rows:
                    if name in self._ended:
                        self._made[name] = list(takewhile(lambda token: token >= 0, drafts))  # -1: none
            update(draft_token_ids)

        return update_draft_token_ids


def install(engine: Any, spec: SpeculativeSettings | None) -> FirstDrafts | None:
    """Hand first drafts on from now on; None if the engine does not draft, or only on its device."""
    scheduler = engine.scheduler
    if spec is None or scheduler.use_v2_model_runner or scheduler.scheduler_config.async_scheduling:
        return None
    by_model = registry.method(spec.method).keeps_kv and spec.mtp_strategy == "default"
    return FirstDrafts(scheduler, min(MOST, spec.limit) if by_model else spec.limit)
