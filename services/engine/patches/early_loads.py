"""Make reservations for prompts computed elsewhere leave free blocks for growing answers.

A DECODE reserves the blocks of its whole prompt before its source has said anything, and vLLM cannot take
them back: answers that need another block would be preempted and computed again while these blocks wait for
the source's queue. So, while requests run, such a reservation waits unless `GROWTH_TOKENS` for each of them
stay free beside it: at 30 ms a token that is two seconds, in which most prompts are computed. It stops
waiting once its source has said that something can be pulled.

A waiting request costs each step 4 us. Asking the connector instead would be too late: vLLM first looks a
prompt up in the prefix cache, for 7 ms if 100,000 tokens are found.

Leans on: vllm.v1.core.sched.scheduler.Scheduler (schedule; _handle_blocked_waiting_request, which is asked of
each request before anything else, and for False looks at the next one; _request_remaining_blocks, running,
deferred_waiting, block_size, kv_cache_config.kv_cache_groups,
kv_cache_manager.block_pool.get_num_free_blocks), RequestStatus.WAITING.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace

GROWTH_TOKENS = 64  # per running request


class EarlyLoads:
    """The seam in a loaded engine's scheduler. For the engine's thread."""

    def __init__(self, scheduler: Any, connector: Any) -> None:
        """Hold reservations back from now on."""
        from vllm.v1.request import RequestStatus

        self._scheduler, self._connector = scheduler, connector
        self._waiting = RequestStatus.WAITING
        groups = len(scheduler.kv_cache_config.kv_cache_groups)
        self._growth = groups * -(-GROWTH_TOKENS // scheduler.block_size)
        self._kept = 0  # blocks, in this step
        self._held: set[Any] = set()  # requests
        replace(scheduler, "schedule", self._counting, ("throttle_prefills",))
        replace(scheduler, "_handle_blocked_waiting_request", self._holding, ("request",))

    def _counting(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        def counting(throttle_prefills: bool = False) -> Any:
            self._kept = self._growth * len(self._scheduler.running)
            if self._held:
                self._release()
            return schedule(throttle_prefills)

        return counting

    def _holding(self, ready: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def holding(request: Any) -> bool:
            if self._kept and self._connector.is_unheard(request.request_id) and not self._fits(request):
                self._held.add(request)
                return False
            return ready(request)

        return holding

    def _release(self) -> None:
        """Let requests whose source has spoken wait only for room: vLLM may count them as deferred."""
        heard = {one for one in self._held if not self._connector.is_unheard(one.request_id)}
        self._held -= heard
        waiting = {one for one in heard if one.status == self._waiting}
        self._scheduler.deferred_waiting.difference_update(waiting)

    def _fits(self, request: Any) -> bool:
        scheduler = self._scheduler
        free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        needed: int = scheduler._request_remaining_blocks(request)
        return free - needed >= self._kept


def install(engine: Any) -> None:
    """Hold a loaded engine's reservations back from now on, if it takes KV over.

    Call it once, after giving_way.install: requests that giving way leaves out of a step grow in the next
    ones.
    """
    connector = engine.scheduler.get_kv_connector()
    if connector is not None:
        EarlyLoads(engine.scheduler, connector)
