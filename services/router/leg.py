"""Run one phase of one attempt on one worker: send its Start, and handle the worker's messages.

    PrefillLeg   prompt and first token, on the prefill worker (prefill_leg.py)
    DecodeLeg    the remaining tokens, on the decode worker; without a prefill worker the prompt too
                 (decode_leg.py)

The two legs of a pair run at the same time. The decode leg holds its worker's messages back until the prefill
leg has succeeded: the client gets tokens in order, and none of an attempt whose prefill failed.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Protocol

from baton.protos import scheduler_pb2, worker_pb2
from baton.services.classes import ServiceClass
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.recovery import Failure, Trouble
from baton.services.router.sink import OutputSink
from baton.services.router.state import RequestState
from baton.services.router.stream import WorkerStream

_ENGINE_ENDED_IT = ("abort", "error")

_TROUBLE = {
    worker_pb2.Failed.CODE_HANDOFF: Trouble.HANDOFF,
    worker_pb2.Failed.CODE_SOURCE: Trouble.SOURCE,
    worker_pb2.Failed.CODE_DRAINING: Trouble.REFUSED,
    worker_pb2.Failed.CODE_FULL: Trouble.FULL,
    worker_pb2.Failed.CODE_STAGING: Trouble.REFUSED,
    worker_pb2.Failed.CODE_INVALID: Trouble.INVALID,
    worker_pb2.Failed.CODE_STALE: Trouble.STALE,
    worker_pb2.Failed.CODE_ENGINE: Trouble.ENGINE,
}

NOT_LOADED = (Trouble.HANDOFF, Trouble.SOURCE)


def _service(service: ServiceClass) -> worker_pb2.ServiceClass:
    """Return a request's class as a message for workers."""
    return worker_pb2.ServiceClass(
        priority=service.priority,
        patience_ms=round(1e3 * service.patience_s),
        share=service.share,
        itl_s=service.itl_s or 0.0,
        preemptible=service.preemptible,
        ttft_s=service.ttft_s or 0.0,
    )


class LegHost(Protocol):
    """The callbacks of a leg."""

    state: RequestState

    def reach(
        self, worker: scheduler_pb2.Worker, then: Callable[[WorkerStream | WorkerUnreachable], None]
    ) -> None:
        """Call `then` with the open stream to `worker`, at once if there is one."""

    def grow(self) -> bool:
        """Reserve memory in the journal for more output. Return False if there is none: the request ends."""

    def loaded(self, admitted: worker_pb2.Admitted) -> None:
        """Count a handoff that the decode worker has loaded."""

    def gap(self, engine_s: float, wire_s: float, received: float) -> None:
        """Count a sample of the time between two tokens."""

    def prefix_loaded(self, admitted: worker_pb2.Admitted) -> None:
        """Count a prefix that the prefill worker has loaded."""

    def prefilled(self) -> None:
        """Report that the prompt is prefilled."""

    def shared(self, blocks: int) -> None:
        """Report KV blocks of the decode worker that the request shares with others."""

    def close(self) -> None:
        """Release the request's resources: it has its outcome."""


class Leg(ABC):
    """A StreamListener whose future `over` gets its result: None for success, or a Failure.

    From then on the worker's messages are ignored. A leg that was started must be closed.
    """

    _PHASE: ClassVar[worker_pb2.Phase]
    _SOURCE_LOST: ClassVar[Trouble]

    def __init__(
        self,
        host: LegHost,
        sink: OutputSink,
        worker: scheduler_pb2.Worker,
        source: worker_pb2.Source | None,
        **more: Any,
    ) -> None:
        """source: the worker whose KV it loads; more: further fields of its Start, which is built now."""
        state = host.state
        self._host = host
        self._sink = sink
        self._state = state
        self._worker = worker
        self._kv_source = source.worker_id if source is not None else worker.worker_id
        self._pulls = source is not None  # a handoff is under way
        self._behind: list[Callable[[], None]] | None = None  # calls held back until the prefill succeeds
        self._holds = False  # each output is held back until the next one
        self._stream: WorkerStream | None = None
        self._fresh = True  # no output has come yet
        self.request_id = state.request_id
        self.epoch = state.epoch
        self.over: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._unsent: worker_pb2.Start | None = worker_pb2.Start(
            request_id=state.request_id,
            epoch=state.epoch,
            phase=self._PHASE,
            engine_request=state.engine_request,
            output_token_ids=state.tokens,
            traceparent=state.trace.traceparent,
            service=_service(state.service),
            party=state.party.number,
            source=source,
            **more,
        )

    @property
    def failure(self) -> Failure | None:
        """Its failure, if it has failed."""
        return self.over.result() if self.over.done() and not self.over.cancelled() else None

    def start(self) -> None:
        """Send the Start as soon as the worker is connected."""
        self._host.reach(self._worker, self._reached)

    async def run(self) -> Failure | None:
        """Run the leg to its end. Return its failure, or None."""
        try:
            self.start()
            return await self.over
        finally:
            self.close()

    def stop(self) -> None:
        """Close the leg, and abort the request at the worker unless the leg has ended."""
        if self._stream is not None and not self.over.done():
            self._stream.abort(self.request_id)
        self.close()

    def close(self) -> None:
        """Ignore all further messages. Idempotent."""
        self.over.cancel()
        if self._behind:
            self._behind.clear()
        if self._stream is not None:
            self._stream.forget(self)

    def watch(self, on_lost: Callable[[str], None]) -> AbstractContextManager[None]:
        """Call `on_lost` if this leg's worker is lost inside the block, while another worker pulls its KV."""
        if self._stream is None:
            raise RuntimeError(f"the {type(self).__name__} of {self.request_id} never reached its worker")
        return self._stream.watch_pull(self.request_id, on_lost)

    def _reached(self, stream: WorkerStream | WorkerUnreachable) -> None:
        start, self._unsent = self._unsent, None
        if self.over.done() or start is None:
            return  # closed before the worker was connected
        if isinstance(stream, WorkerUnreachable):
            self._end(Failure(Trouble.UNREACHABLE, self._worker.worker_id, str(stream)))
            return
        self._stream = stream
        if self._behind is None:
            self._take_part(stream)
        if not stream.begin(self, start):
            self._end(self._failure(Trouble.FULL, "its queue is full"))

    # -- StreamListener

    def on_output(self, output: Any, clock_offset_s: float) -> None:
        """Deliver one step's tokens, unless they must be held back."""
        if self.over.done():
            return
        if self._behind is not None:
            self._behind.append(partial(self.on_output, output, clock_offset_s))
            return
        state = self._state
        if self._fresh:
            self._fresh = self._pulls = False
            self._first_output(output, clock_offset_s)
        elif output.events is not None:
            self._sink.adapt(output, clock_offset_s)
        if output.spec_decode_metrics is not None:
            state.timings.drafts = output.spec_decode_metrics  # cumulative; any output may be the last
            output.spec_decode_metrics = None  # vLLM's front end would show them to the client
        tokens = output.new_token_ids
        if tokens:
            now = state.timings.last_token = time.monotonic()
            if not state.timings.first_token:
                self._first_token(now)
            state.tokens.extend(tokens)
            if state.outgrown and not self._host.grow():
                return
        output.request_id = state.frontend_id
        if output.finish_reason is not None:
            self._finish(output)
        elif self._holds:
            self._hold(output)
        else:
            self._sink.deliver(output)

    def on_gap(self, engine_s: float, wire_s: float, received: float) -> None:
        if self._behind is None:
            self._host.gap(engine_s, wire_s, received)

    @abstractmethod
    def on_saved(self, saved: worker_pb2.Saved) -> None:
        """Handle the prefill worker's report that it has saved the KV, or could not."""

    @abstractmethod
    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        """Handle the report that the worker has loaded the KV from its source."""

    @abstractmethod
    def on_shared(self, shared: worker_pb2.Shared) -> None:
        """Handle the number of KV blocks that the request shares with others of the same prefix."""

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        trouble = _TROUBLE.get(failed.code, Trouble.ENGINE)
        self._end(self._failure(trouble, failed.message, engine_goes_on=failed.engine_goes_on))

    def on_lost(self, message: str) -> None:
        self._end(self._failure(Trouble.LOST, f"its stream ended: {message}"))

    def on_source_lost(self, message: str) -> None:
        """Fail if the KV is still being pulled from the lost worker: its own deadline is much later."""
        if not self._pulls or self.over.done():
            return
        if self._stream is not None:
            self._stream.abort(self.request_id)
        source = self._kv_source
        self._end(Failure(self._SOURCE_LOST, source, f"worker {source}: lost with the KV cache: {message}"))

    # -- helpers

    @abstractmethod
    def _take_part(self, stream: WorkerStream) -> None:
        """Record the worker in the request's state."""

    def _first_output(self, output: Any, clock_offset_s: float) -> None:
        """Record the worker's times from the leg's first output."""
        queued, began = self._sink.adapt(output, clock_offset_s)
        timings = self._state.timings
        if timings.first_token:
            timings.decode_began, timings.resumed = began, time.monotonic()
        elif self._stream is not None:
            timings.queued, timings.prefill_began = queued, began
            timings.prefill_ended = self._stream.put_out_at

    def _first_token(self, now: float) -> None:
        self._state.timings.first_token = now

    def _hold(self, output: Any) -> None:
        self._state.timings.held = True
        self._sink.hold(output)

    def _finish(self, output: Any) -> None:
        """Handle an output with a finish reason: the request or the leg is complete, or the engine failed."""
        reason = str(output.finish_reason)
        broken = reason in _ENGINE_ENDED_IT
        if not broken and not (reason == "length" and not self._state.complete and self._cut()):
            self._complete(output, reason)
            return
        output.finish_reason = None
        output.stop_reason = None
        if output.new_token_ids:
            pass_on = self._hold if self._holds else self._sink.deliver
            pass_on(output)
        if broken:
            message = f"its engine ended the request ({reason})"
            self._end(self._failure(Trouble.ENGINE, message, engine_goes_on=True))

    @abstractmethod
    def _cut(self) -> bool:
        """Handle the last token that this leg asked for. Return False if the request is complete."""

    def _complete(self, output: Any, reason: str) -> None:
        self._state.outcome = reason
        self._host.close()  # before the last token: the client may send its next request at once
        self._sink.deliver(output)
        self._end(None)

    def _failure(self, trouble: Trouble, message: str, *, engine_goes_on: bool = False) -> Failure:
        # If KV cannot be loaded, blame the worker it came from.
        blamed = self._kv_source if trouble in NOT_LOADED else self._worker.worker_id
        return Failure(trouble, blamed, f"worker {self._worker.worker_id}: {message}", engine_goes_on)

    def _end(self, failure: Failure | None) -> None:
        if not self.over.done():
            self.over.set_result(failure)
