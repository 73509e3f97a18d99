"""Pass the workers' outputs to vLLM's front end: on one clock, through one queue, in few objects.

Leans on: vllm.v1.engine.{EngineCoreOutput, EngineCoreOutputs, EngineCoreEventType, FinishReason} and their
fields; that AsyncLLM's output handler alone calls get_output_async.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason

LATE_S = 0.01  # the lag at which a stream counts as late: about a step of a fast engine
PAUSE_S = 0.001
MAX_PAUSES = 10  # so an output waits here for 10 ms at most
_PREEMPTED = EngineCoreEventType.PREEMPTED
_QUEUED = EngineCoreEventType.QUEUED
_SCHEDULED = EngineCoreEventType.SCHEDULED


def began_at(events: list[Any]) -> tuple[float, float]:
    """Return when the engine queued and first scheduled the request, by its clock; 0 if unknown."""
    queued = scheduled = 0.0
    for event in events:
        if event.type == _QUEUED:
            queued = queued or float(event.timestamp)
        elif event.type == _SCHEDULED:
            scheduled = scheduled or float(event.timestamp)
    return queued, scheduled


def rebase(events: list[Any], offset_s: float) -> None:
    """Convert events from another host's monotonic clock to ours, in place."""
    for event in events:
        event.timestamp += offset_s


def only_preemptions(events: list[Any]) -> list[Any] | None:
    """Return only the preemptions: the front end knows only the first worker's queueing."""
    return [event for event in events if event.type == _PREEMPTED] or None


def finish_output(request_id: str, reason: str) -> Any:
    """Return an output without tokens that ends a request: 'length', 'stop' or 'abort'."""
    finish_reason = FinishReason[reason.upper()]
    return EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=finish_reason)


def merge(earlier: Any, later: Any) -> bool:
    """Merge `later` into `earlier`, of the same request, if that loses nothing. Return whether it did so."""
    if (
        earlier.finish_reason is not None
        or earlier.new_logprobs is not None
        or later.new_logprobs is not None
        or earlier.new_sampling_mask is not None
        or later.new_sampling_mask is not None
        or earlier.routed_experts is not None
        or later.routed_experts is not None
        or later.prefill_stats is not None
        or later.new_prompt_logprobs_tensors is not None
        or later.mm_cache_miss_hashes is not None
    ):
        return False
    earlier.new_token_ids += later.new_token_ids
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
    earlier.spec_decode_metrics = later.spec_decode_metrics
    if later.events is not None:
        earlier.events = (earlier.events or []) + later.events
    return True


class OutputQueue:
    """Outputs that the front end has not taken yet.

    A request's tokens are merged while they wait (unless they have log-probabilities), so the queue holds
    about one output per live request. If the streams are read late, `take` lets more outputs arrive first:
    the front end gets fewer and larger outputs, at a lower cost per token, and catches up.

    With `flush_s`, outputs wait up to that long, except those that begin or end a request.
    """

    def __init__(self, lag_s: Callable[[], float], flush_s: float = 0.0) -> None:
        """Ask `lag_s` how late, in seconds, the workers' streams are read."""
        self._lag_s = lag_s
        self._flush_s = flush_s
        self._outputs: list[Any] = []  # outputs to be taken
        self._waiting: list[Any] = []  # held until the next flush
        self._last: dict[str, Any] = {}  # request -> its last output in either list
        self._taker: asyncio.Future[None] | None = None

    def put(self, output: Any, *, at_once: bool = False) -> None:
        """Add an output, to be taken `at_once` or with the next flush. For the event loop's thread."""
        request_id = output.request_id
        last = self._last.get(request_id)
        if last is not None and merge(last, output):
            if self._waiting and (at_once or output.finish_reason is not None):
                self._release(request_id)
            return
        self._last[request_id] = output
        if self._flush_s and not at_once and output.finish_reason is None:
            if not self._waiting:
                asyncio.get_running_loop().call_later(self._flush_s, self._flush)
            self._waiting.append(output)
            return
        if self._waiting:
            self._release(request_id)
        self._outputs.append(output)
        self._wake()

    def drop(self, request_id: str) -> None:
        if self._last.pop(request_id, None) is not None:
            self._outputs = [output for output in self._outputs if output.request_id != request_id]
            self._waiting = [output for output in self._waiting if output.request_id != request_id]

    async def take(self) -> Any:
        """Wait for outputs; return all that may be taken, in one EngineCoreOutputs. For one caller."""
        while not self._outputs:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        for _ in range(MAX_PAUSES):
            if self._lag_s() < LATE_S:
                break
            await asyncio.sleep(PAUSE_S)  # a real pause, so that gRPC's thread can run
        outputs, self._outputs = self._outputs, []
        if self._waiting:
            for output in outputs:
                self._last.pop(output.request_id, None)
        else:
            self._last.clear()
        # No scheduler statistics: those of several engines would overwrite each other.
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())

    def _flush(self) -> None:
        if self._waiting:
            self._outputs += self._waiting
            self._waiting = []
            self._wake()

    def _release(self, request_id: str) -> None:
        own = [output for output in self._waiting if output.request_id == request_id]
        if own:
            self._waiting = [output for output in self._waiting if output.request_id != request_id]
            self._outputs += own
            self._wake()

    def _wake(self) -> None:
        taker = self._taker
        if taker is not None and not taker.done():
            taker.set_result(None)
