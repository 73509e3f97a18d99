"""The KV of a request that goes first is awaited before another step of those that give way begins.

A load takes some milliseconds beside whatever step runs. But vLLM orders it with a step and hears of its end
after that, so its request would begin two steps after the one in which it came. Here, while only requests
that give way run, its load is ordered in a step without tokens, and they wait for its end: no longer than
`PART` of a step's time, once for each load.

Leans on: vllm.v1.core.sched.scheduler.Scheduler (schedule; running, waiting, kv_holding_waiting,
deferred_waiting, finished_recving_kv_req_ids, policy, max_num_active_reqs),
request_queue.create_request_queue, vllm.v1.request.Request (kv_transfer_params, num_output_tokens,
num_preemptions), and on that a request whose load begins takes no slot before its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from baton.handoff.params import asks_for_load

PART = 0.5  # of a step's time: what those that give way wait


class AwaitedLoads:
    """The loads for which an engine's steps wait. For the engine's thread."""

    def __init__(self, scheduler: Any, priority: Callable[[Any], int]) -> None:
        """Begin with none. priority: of a request's class; a lower one goes first."""
        self._scheduler = scheduler
        self._priority = priority
        self._step_s = 0.0  # the last step's
        self._request: Any = None  # the last one awaited
        self._until = 0.0  # time.monotonic

    def observe(self, seconds: float) -> None:
        """Take note of a step's time, of one with tokens."""
        self._step_s = seconds

    def next(self) -> Any:
        """Return the request whose KV is to be awaited now; None where the engine should go on.

        It goes before all that run, and its KV, that of a whole prompt, is not here yet.
        """
        found = self._candidate()
        if found is None:
            return None
        if found is not self._request:
            self._request, self._until = found, time.monotonic() + PART * self._step_s
        return found if time.monotonic() < self._until else None

    def has_begun(self, request: Any) -> bool:
        """Return whether the load has been ordered, and blocks are its own."""
        return request in self._scheduler.deferred_waiting

    def schedule(self, request: Any, schedule: Callable[[], Any]) -> Any:
        """Return a step in which nobody runs, and this request's load begins if it has not yet."""
        from vllm.v1.core.sched.request_queue import create_request_queue

        scheduler = self._scheduler
        running, holding, slots = (
            list(scheduler.running),
            scheduler.kv_holding_waiting,
            scheduler.max_num_active_reqs,
        )
        scheduler.running[:] = []
        scheduler.kv_holding_waiting = create_request_queue(scheduler.policy)
        scheduler.max_num_active_reqs = 0 if self.has_begun(request) else 1
        try:
            return schedule()
        finally:
            scheduler.running[:] = running + scheduler.running  # it had nothing to load, and runs
            for one in scheduler.kv_holding_waiting:
                holding.add_request(one)
            scheduler.kv_holding_waiting, scheduler.max_num_active_reqs = holding, slots

    def _candidate(self) -> Any:
        scheduler = self._scheduler
        if not scheduler.running:
            return None
        running = min(map(self._priority, scheduler.running))
        first = [one for one in scheduler.kv_holding_waiting if self._priority(one) < running]
        if any(one.request_id in scheduler.finished_recving_kv_req_ids for one in first):
            return None  # it can begin
        if scheduler.waiting:
            newcomer = scheduler.waiting.peek_request()
            if self._priority(newcomer) < running and newcomer not in scheduler.deferred_waiting:
                return newcomer if self._loads_whole(newcomer) else None
        return next((one for one in first if self._loads_whole(one)), None)

    @staticmethod
    def _loads_whole(one: Any) -> bool:
        return asks_for_load(one.kv_transfer_params) and one.num_output_tokens > 0 and not one.num_preemptions
