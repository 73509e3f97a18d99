"""The KV of a request that goes first is awaited before another step of those that give way begins.

A load takes some milliseconds beside whatever step runs. But vLLM orders it with a step and hears of its end
after that, so its request would begin two steps after the one in which it came. Here, while only requests
that give way run, its load is ordered in a step in which nobody runs, and they wait for its end: between two
of their steps no longer than `PART` of a step's time, and once for each load.

Leans on: vllm.v1.core.sched.scheduler.Scheduler (schedule; running, waiting, kv_holding_waiting,
deferred_waiting, finished_recving_kv_req_ids, requests, policy, max_num_active_reqs),
request_queue.create_request_queue, vllm.v1.request.Request (kv_transfer_params, num_tokens,
num_output_tokens, num_preemptions, status), RequestStatus.WAITING_FOR_REMOTE_KVS, and on the fact that a
request whose load begins takes no slot before its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from baton.handoff.params import asks_for_load

PART = 0.5  # of a step's time is what those that give way wait
# Of those that run. A step without them drops their rows from the model runner's batch, and the next one
# copies their tokens there again: so many take about a millisecond.
MOST_TOKENS = 50_000


class AwaitedLoads:
    """Decides for which loads an engine's steps wait. For the engine's thread."""

    def __init__(self, scheduler: Any, priority: Callable[[Any], int]) -> None:
        """Begin with none. priority: of a request's class; a lower one goes first."""
        from vllm.v1.core.sched.request_queue import create_request_queue
        from vllm.v1.request import RequestStatus

        self._scheduler = scheduler
        self._priority = priority
        self._queue: Callable[[], Any] = lambda: create_request_queue(scheduler.policy)
        self._loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._step_s = 0.0  # the last step's
        self._until = 0.0  # time.monotonic; 0: nothing was awaited since the last step
        self._awaited: set[str] = set()  # since the last step
        self._spent: set[str] = set()  # awaited before that: a step has begun without them

    def observe(self, seconds: float) -> None:
        """Take note of a step's time, of one with tokens."""
        self._step_s, self._until = seconds, 0.0
        if self._spent or self._awaited:
            known = self._scheduler.requests
            self._spent = {name for name in self._spent | self._awaited if name in known}
            self._awaited.clear()

    def next(self) -> Any:
        """Return the request whose KV is to be awaited now; None where the engine should go on.

        It goes before all that run, and its KV, that of a whole prompt, is not here yet.
        """
        found = self._candidate()
        if found is None:
            return None
        now = time.monotonic()
        self._until = self._until or now + PART * self._step_s
        return found if now < self._until else None

    def has_begun(self, request: Any) -> bool:
        """Return whether the load has been ordered, and blocks are its own."""
        return bool(request.status == self._loading)

    def schedule(self, request: Any, schedule: Callable[[], Any]) -> Any:
        """Return a step in which nobody runs, and this request's load begins if it has not yet."""
        scheduler = self._scheduler
        running, holding, waiting, slots = (
            list(scheduler.running),
            scheduler.kv_holding_waiting,
            scheduler.waiting,
            scheduler.max_num_active_reqs,
        )
        self._awaited.add(request.request_id)
        scheduler.running[:] = []
        scheduler.kv_holding_waiting, scheduler.waiting = self._queue(), self._queue()
        if not self.has_begun(request):
            waiting.remove_request(request)
            scheduler.waiting.add_request(request)
        scheduler.max_num_active_reqs = 1
        try:
            return schedule()
        finally:
            scheduler.running[:] = running + scheduler.running  # it had nothing to load, and runs
            for one in scheduler.kv_holding_waiting:
                holding.add_request(one)
            for one in scheduler.waiting:
                waiting.add_request(one)
            scheduler.kv_holding_waiting, scheduler.waiting = holding, waiting
            scheduler.max_num_active_reqs = slots

    def _candidate(self) -> Any:
        scheduler = self._scheduler
        if not scheduler.running:
            return None
        running = min(map(self._priority, scheduler.running))
        first = [one for one in scheduler.kv_holding_waiting if self._priority(one) < running]
        if any(one.request_id in scheduler.finished_recving_kv_req_ids for one in first):
            return None  # it can begin
        loading = [one for one in first if self.has_begun(one)]
        if scheduler.waiting:
            newcomer = scheduler.waiting.peek_request()
            if self._priority(newcomer) < running and newcomer not in scheduler.deferred_waiting:
                if not asks_for_load(newcomer.kv_transfer_params):
                    return None  # so can this one
                loading.append(newcomer)
        found = next((one for one in loading if self._is_worth_it(one)), None)
        if found is None or sum(one.num_tokens for one in scheduler.running) > MOST_TOKENS:
            return None
        return found

    def _is_worth_it(self, one: Any) -> bool:
        """Return whether a request decodes as soon as its KV is here, and nobody has waited for it yet."""
        return (
            asks_for_load(one.kv_transfer_params)
            and one.num_output_tokens > 0
            and not one.num_preemptions
            and one.request_id not in self._spent
        )
