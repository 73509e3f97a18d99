"""Run one phase of one attempt on one worker: the messages of its stream, and their meaning for the request.

    PrefillLeg   the prompt and the first token, on the worker that prefills (prefill_leg.py)
    DecodeLeg    from there to the end, on the worker that decodes; alone it has the prompt as well
                 (decode_leg.py)

The two legs of a pair run at the same time. Everything that comes from the second one waits in it until the
first has ended well: the client gets the tokens in order, and none from an attempt whose prefill failed.
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
    """Return what a worker needs to know of a request's class."""
    return worker_pb2.ServiceClass(
        priority=service.priority,
        patience_ms=round(1e3 * service.patience_s),
        share=service.share,
        itl_s=service.itl_s or 0.0,
        preemptible=service.preemptible,
        ttft_s=service.ttft_s or 0.0,
    )


class LegHost(Protocol):
    """The part of a request's relay that its legs use."""

    state: RequestState

    def reach(
        self, worker: scheduler_pb2.Worker, then: Callable[[WorkerStream | WorkerUnreachable], None]
    ) -> None:
        """Call `then` with the open stream to `worker`, at once if there is one."""

    def grow(self) -> bool:
        """Get the output more room in the journal. Return False if there is none: the request has ended."""

    def loaded(self, admitted: worker_pb2.Admitted) -> None:
        """Count a handoff that the decode worker has loaded."""

    def gap(self, engine_s: float, wire_s: float, received: float) -> None:
        """Take a sample of the time between two tokens."""

    def prefix_loaded(self, admitted: worker_pb2.Admitted) -> None:
        """Note that the prefill worker has loaded the prompt's beginning."""

    def prefilled(self) -> None:
        """Report that the prompt is prefilled."""

    def shared(self, blocks: int) -> None:
        """Report KV blocks of the decode worker that the request shares with others."""

    def close(self) -> None:
        """Release what the request holds: it has its outcome."""


class Leg(ABC):
    """A StreamListener. It ends once, with `over`: None if its part is done, or a Failure.

    After its end no message of the worker reaches the request. Whoever starts a leg closes it.
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
        """source: whose KV the worker loads; more: further fields of the Start, which is made now."""
        state = host.state
        self._host = host
        self._sink = sink
        self._state = state
        self._worker = worker
        self._kv_source = source.worker_id if source is not None else worker.worker_id
        self._pulls = source is not None  # a handoff is under way
        self._behind: list[Callable[[], None]] | None = None  # messages that wait for another leg
        self._holds = False  # outputs wait for the next ones
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
        """Its failure, once it has ended with one."""
        return self.over.result() if self.over.done() and not self.over.cancelled() else None

    def start(self) -> None:
        """Send the Start, at once or as soon as the worker is connected."""
        self._host.reach(self._worker, self._reached)

    async def run(self) -> Failure | None:
        """Start, and return the leg's failure, or None."""
        try:
            self.start()
            return await self.over
        finally:
            self.close()

    def stop(self) -> None:
        """Close it, and have the worker drop the request unless the leg has ended."""
        if self._stream is not None and not self.over.done():
            self._stream.abort(self.request_id)
        self.close()

    def close(self) -> None:
        """Let no further message reach the request. Idempotent."""
        self.over.cancel()
        if self._behind:
            self._behind.clear()
        if self._stream is not None:
            self._stream.forget(self)

    def watch(self, on_lost: Callable[[str], None]) -> AbstractContextManager[None]:
        """Call `on_lost` if this leg's worker is lost inside the block, while another pulls from it."""
        if self._stream is None:
            raise RuntimeError(f"the {type(self).__name__} of {self.request_id} never reached its worker")
        return self._stream.watch_pull(self.request_id, on_lost)

    def _reached(self, stream: WorkerStream | WorkerUnreachable) -> None:
        start, self._unsent = self._unsent, None
        if self.over.done() or start is None:
            return  # it was closed meanwhile
        if isinstance(stream, WorkerUnreachable):
            self._end(Failure(Trouble.UNREACHABLE, self._worker.worker_id, str(stream)))
            return
        self._stream = stream
        if self._behind is None:
            self._take_part(stream)
        if not stream.begin(self, start):
            self._end(self._failure(Trouble.FULL, "its queue is full"))

    # -- the stream's calls

    def on_output(self, output: Any, clock_offset_s: float) -> None:
        """Pass on one step's tokens at once, unless the client's stream could not continue after them."""
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
            state.timings.drafts = output.spec_decode_metrics  # taken each time: it may be the last
            output.spec_decode_metrics = None  # vLLM's front end would show it to every client
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
        """Pass a sample of the time between two tokens on."""
        if self._behind is None:
            self._host.gap(engine_s, wire_s, received)

    @abstractmethod
    def on_saved(self, saved: worker_pb2.Saved) -> None:
        """Note that the prompt's KV cache is kept for another worker, or could not be."""

    @abstractmethod
    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        """Note that the worker has loaded the KV cache that it waited for."""

    @abstractmethod
    def on_shared(self, shared: worker_pb2.Shared) -> None:
        """Report the KV blocks that the request shares with others of the same prefix."""

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        trouble = _TROUBLE.get(failed.code, Trouble.ENGINE)
        self._end(self._failure(trouble, failed.message, engine_goes_on=failed.engine_goes_on))

    def on_lost(self, message: str) -> None:
        self._end(self._failure(Trouble.LOST, f"its stream ended: {message}"))

    def on_source_lost(self, message: str) -> None:
        """End the leg if it still pulls from the lost worker: a pull's own deadline is much longer."""
        if not self._pulls or self.over.done():
            return
        if self._stream is not None:
            self._stream.abort(self.request_id)
        source = self._kv_source
        self._end(Failure(self._SOURCE_LOST, source, f"worker {source}: lost with the KV cache: {message}"))

    # -- what the messages lead to

    @abstractmethod
    def _take_part(self, stream: WorkerStream) -> None:
        """Note that the worker takes part in the request."""

    def _first_output(self, output: Any, clock_offset_s: float) -> None:
        """Note what the leg's first output says about its worker's times."""
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
        """Handle the engine's last output: the end of the request or the leg, or the engine's failure."""
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
        """Go on after the last token that the engine was asked for. False: it is the request's last one."""

    def _complete(self, output: Any, reason: str) -> None:
        self._state.outcome = reason
        self._host.close()  # first: a client with its last byte may send its next request at once
        self._sink.deliver(output)
        self._end(None)

    def _failure(self, trouble: Trouble, message: str, *, engine_goes_on: bool = False) -> Failure:
        # KV that cannot be loaded came from another worker, whose copy is lost or wrong.
        blamed = self._kv_source if trouble in NOT_LOADED else self._worker.worker_id
        return Failure(trouble, blamed, f"worker {self._worker.worker_id}: {message}", engine_goes_on)

    def _end(self, failure: Failure | None) -> None:
        if not self.over.done():
            self.over.set_result(failure)
