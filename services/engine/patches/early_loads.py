"""Reserve free blocks for growing answers when requests reserve blocks for prompts computed elsewhere.

A DECODE reserves the blocks of its whole prompt before its source has reported anything, and vLLM cannot take
them back, so answers that need another block would be preempted. While requests are running, such a
reservation has to wait unless it leaves room for `GROWTH_TOKENS` more tokens of each: two seconds at 30 ms
per token, in which most prompts are computed. The wait ends once the source has KV to pull.

vLLM asks `_handle_blocked_waiting_request` first, at 4 us per step and waiting request. The connector is
asked only after a look-up in the prefix cache, which takes 7 ms if it finds 100,000 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.services.engine.patches.replace import replace
from baton.services.engine.request_blocks import most_blocks

GROWTH_TOKENS = 64  # per running request


class EarlyLoads:
    """Holds back reservations in a loaded engine's scheduler. Call it on the engine's thread."""

    def __init__(self, scheduler: Any, handoffs: Any) -> None:
        from vllm.v1.request import RequestStatus

        self._scheduler, self._handoffs = scheduler, handoffs
        self._waiting = RequestStatus.WAITING
        self._most_blocks = most_blocks(scheduler)
        self._growth = self._most_blocks(GROWTH_TOKENS)
        self._kept = 0  # blocks to keep free in this step
        self._held: set[Any] = set()  # requests whose reservation is held back
        replace(scheduler, "schedule", self._schedule)
        replace(scheduler, "_handle_blocked_waiting_request", self._is_ready)

    def _schedule(self, original: Callable[..., Any], throttle_prefills: bool = False) -> Any:
        self._kept = self._growth * len(self._scheduler.running)
        if self._held:
            self._release()
        return original(throttle_prefills)

    def _is_ready(self, original: Callable[[Any], bool], request: Any) -> bool:
        if self._kept and self._handoffs.is_unheard(request.request_id):
            free: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            if free - self._most_blocks(request.num_tokens) < self._kept:
                self._held.add(request)
                return False
        return original(request)

    def _release(self) -> None:
        """No longer count requests as deferred once their source has reported: they need only free blocks."""
        heard = {one for one in self._held if not self._handoffs.is_unheard(one.request_id)}
        self._held -= heard
        waiting = {one for one in heard if one.status == self._waiting}
        self._scheduler.deferred_waiting.difference_update(waiting)


def install(engine: Any) -> None:
    """Hold back reservations. Call it after giving_way.install: requests left out of a step still grow."""
    connector = engine.scheduler.get_kv_connector()
    if connector is not None:
        EarlyLoads(engine.scheduler, connector.scheduler_side)
