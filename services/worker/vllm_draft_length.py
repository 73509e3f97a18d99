"""Lets vLLM's scheduler ask us how many tokens each step drafts, and tells us what became of it.

vLLM looks the number up by the number of requests in the step, in a list that it builds from
num_speculative_tokens_per_batch_size: we take the list's place.

Leans on: vllm.v1.core.sched.scheduler.Scheduler (dynamic_sd_lookup, update_from_output), its SchedulerOutput
(num_scheduled_tokens, total_num_scheduled_tokens, scheduled_spec_decode_tokens, num_spec_tokens_to_schedule),
vllm.v1.spec_decode.metrics.SpecDecodingStats (num_draft_tokens_per_pos, num_accepted_tokens_per_pos).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from baton.services.decode.draft_length import DraftChoice, DraftLength, DraftStep
from baton.services.worker.errors import EngineFailed


class DraftLengthSeam:
    """Sits in the engine's thread between the scheduler and who chooses."""

    def __init__(self, scheduler: Any, chooser: DraftLength) -> None:
        """Raises EngineFailed unless vLLM was configured to look the number up."""
        if scheduler.dynamic_sd_lookup is None:
            raise EngineFailed(
                "vLLM drafts a fixed number of tokens: num_speculative_tokens 'auto' has no effect"
            )
        self._chooser = chooser
        self._update = scheduler.update_from_output
        self._output: Any = None  # of the step whose results were taken last
        self._before: Set[str] = frozenset()  # requests of the step before it
        self._asked = 0  # of the step before it
        scheduler.dynamic_sd_lookup = self
        scheduler.update_from_output = self._update_from_output

    def __getitem__(self, requests: int) -> int:
        return self._chooser.choose(requests)

    @property
    def choice(self) -> DraftChoice:
        """The last one, and why."""
        return self._chooser.choice

    def observe(self, seconds: float, stats: Any) -> None:
        """After every step: how long it took, and its SpecDecodingStats if any."""
        output, self._output = self._output, None
        if output is None or not output.num_scheduled_tokens:
            return
        requests = output.num_scheduled_tokens.keys()
        drafted = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        only_decodes = output.total_num_scheduled_tokens == len(requests) + drafted
        limit = output.num_spec_tokens_to_schedule
        none = (0,) * self._chooser.limit
        self._chooser.observe(
            DraftStep(
                requests=len(requests),
                tokens=output.total_num_scheduled_tokens,
                limit=limit,
                seconds=seconds if only_decodes else None,
                rows=len(requests & self._before),
                asked=self._asked,
                drafted=stats.num_draft_tokens_per_pos if stats is not None else none,
                accepted=stats.num_accepted_tokens_per_pos if stats is not None else none,
            )
        )
        self._before, self._asked = requests, limit

    def _update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        self._output = scheduler_output
        return self._update(scheduler_output, model_output)


def install(engine: Any, *, model_tokens: int | None) -> DraftLengthSeam:
    """Choose the drafts' length of a loaded engine from now on; `model_tokens` as DraftLength takes it."""
    limit = engine.vllm_config.speculative_config.num_speculative_tokens
    return DraftLengthSeam(engine.scheduler, DraftLength(limit, model_tokens=model_tokens))
