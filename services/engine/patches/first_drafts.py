"""Hand over, with a prompt, the drafts for the decode worker's first step.

The step that ends a prompt samples the first output token, and the drafter has run over that step, so it can
already draft. vLLM drops such drafts if the request ends there, and its scheduler takes drafts only for
running requests. Here such a step drafts, unless it also decodes. On the decode worker the drafts are
attached to the request and scheduled with its first step, if that step computes the one token before them,
within the token budget and the draft length; after that they are dropped. Verification is exact for any
draft.

Not for asynchronous scheduling or model runner V2, where drafts stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from baton.services.decode.proposers import registry
from baton.services.engine.patches.replace import replace
from baton.services.speculation import SpeculativeSettings

# The maximum number of tokens that a draft model drafts for a handoff. Each draft after the first delays
# the first output token by a pass.
MOST = 2

ALLOCATE_SLOTS = (  # callers pass only the first two by position
    *("request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks", "num_lookahead_tokens"),
    *("num_external_computed_tokens", "delay_cache_blocks", "num_encoder_tokens", "full_sequence_must_fit"),
    *("reserved_blocks", "has_scheduled_reqs", "skip_zeroing_group_ids"),
)


def want(request: Any) -> None:
    """Mark a request whose drafts another worker wants at the end of its prompt."""
    request.drafts_wanted = True


def give(request: Any, drafts: Sequence[int]) -> None:
    """Attach drafts that follow the request's last token, to be verified in its first step here."""
    request.first_drafts = request.num_tokens, list(drafts)


class FirstDrafts:
    """Takes and gives drafts in a loaded engine's scheduler. Call it on the engine's thread."""

    def __init__(self, scheduler: Any, most: int) -> None:
        """Use drafts that come with requests from now on, and draft `most` tokens for other workers."""
        self._scheduler = scheduler
        self._most = most
        self._prompts: set[str] = set()  # requests whose prompt is being computed for other workers
        self._ended: set[str] = set()  # requests whose prompt ends in this step
        self._made: dict[str, list[int]] = {}
        replace(scheduler.kv_cache_manager, "allocate_slots", self._allocate_slots, ALLOCATE_SLOTS)
        replace(scheduler, "_update_after_schedule", self._update_after_schedule)
        replace(scheduler, "update_draft_token_ids", self._update_draft_token_ids)

    def take(self) -> dict[str, list[int]]:
        """Return the drafts for other workers, by request id. Called after every step."""
        made, self._made = self._made, {}
        self._ended.clear()
        return made

    def _allocate_slots(
        self, original: Callable[..., Any], request: Any, num_new_tokens: int, *args: Any, **others: Any
    ) -> Any:
        _, drafts = getattr(request, "first_drafts", (0, ()))
        if drafts and num_new_tokens == 1:
            # The drafter writes after the verified tokens, so it needs its own slots as well.
            room = min(len(drafts), self._scheduler.num_spec_tokens)
            more = others | {"num_lookahead_tokens": others.get("num_lookahead_tokens", 0) + room}
            blocks = original(request, num_new_tokens, *args, **more)
            if blocks is not None:
                return blocks
            del request.first_drafts  # rather than wait for a block
        return original(request, num_new_tokens, *args, **others)

    def _update_after_schedule(self, original: Callable[[Any], None], scheduler_output: Any) -> None:
        for one in scheduler_output.scheduled_new_reqs:
            request = self._scheduler.requests[one.req_id]
            if getattr(request, "drafts_wanted", False):
                self._prompts.add(one.req_id)
            at, drafts = request.__dict__.pop("first_drafts", (0, ()))
            if drafts and at == request.num_tokens:
                self._add(scheduler_output, request, drafts)
        if self._prompts:
            self._draft_at_the_end(scheduler_output)
        original(scheduler_output)

    def _add(self, output: Any, request: Any, drafts: list[int]) -> None:
        name, scheduler = request.request_id, self._scheduler
        if output.num_scheduled_tokens[name] != 1 or request.num_computed_tokens + 1 != request.num_tokens:
            return
        most = min(
            output.num_spec_tokens_to_schedule,  # the current draft length
            self._budget(output),
            scheduler.max_model_len - 1 - request.num_tokens,  # leaves a position for the target's own token
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
        """Find the prompts for other workers that end in this step, and draft if nothing decodes in it."""
        self._prompts -= output.finished_req_ids
        step = {name: self._scheduler.requests[name] for name in output.num_scheduled_tokens}
        for name in self._prompts & step.keys():
            if step[name].num_computed_tokens + output.num_scheduled_tokens[name] == step[name].num_tokens:
                self._ended.add(name)
        self._prompts -= self._ended
        if self._ended and all(one.max_tokens - one.num_output_tokens <= 1 for one in step.values()):
            output.num_spec_tokens_to_schedule = max(output.num_spec_tokens_to_schedule, self._most)

    def _update_draft_token_ids(self, original: Callable[[Any], None], draft_token_ids: Any) -> None:
        if self._ended:
            for name, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=False):
                if name in self._ended:
                    self._made[name] = list(takewhile(lambda token: token >= 0, drafts))  # -1 is padding
        original(draft_token_ids)


def install(engine: Any, spec: SpeculativeSettings | None) -> FirstDrafts | None:
    """Hand drafts over from now on; None if the engine does not draft, or only on its device."""
    scheduler = engine.scheduler
    if spec is None or scheduler.use_v2_model_runner or scheduler.scheduler_config.async_scheduling:
        return None
    by_model = registry.method(spec.method).keeps_kv and spec.mtp_strategy == "default"
    return FirstDrafts(scheduler, min(MOST, spec.limit) if by_model else spec.limit)
