"""One phase of one attempt on one worker: the messages of its stream, and their meaning for the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from baton.protos import handoff_pb2, scheduler_pb2, worker_pb2
from baton.scheduler.client import Placement
from baton.services.classes import ServiceClass
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.recovery import Failure, Trouble
from baton.services.router.sink import OutputSink
from baton.services.router.state import RequestState
from baton.services.router.stream import WorkerStream

# From a prompt's first token to its manifest. They come from the same step: later the KV is as good as lost.
SAVED_TIMEOUT_S = 10.0
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

_NOT_LOADED = (Trouble.HANDOFF, Trouble.SOURCE)


def _service(service: ServiceClass) -> worker_pb2.ServiceClass:
    """Return what a worker has to know of a request's class."""
    return worker_pb2.ServiceClass(
        priority=service.priority,
        patience_ms=round(1e3 * service.patience_s),
        share=service.share,
        itl_s=service.itl_s or 0.0,
        preemptible=service.preemptible,
        ttft_s=service.ttft_s or 0.0,
    )


def _booked(placement: Placement, phase: worker_pb2.Phase, *, alone: bool) -> tuple[int, int]:
    """Return the prompt tokens and KV blocks that are booked for a phase on its worker."""
    if alone:
        return 0, 0
    if phase == worker_pb2.PHASE_PREFILL:
        return placement.prompt_tokens, 0
    return (0 if placement.prefill else placement.prompt_tokens), placement.blocks


class LegHost(Protocol):
    """The part of a request's relay that its legs use."""

    state: RequestState

    async def stream(self, worker: scheduler_pb2.Worker) -> WorkerStream:
        """Return the open stream to `worker`. Raises WorkerUnreachable."""

    def grow(self) -> bool:
        """Get the output more room in the journal. Return False when there is none: the request has ended."""

    def begun(self, manifest: handoff_pb2.Manifest) -> None:
        """Have the decode worker pull what is there of a prompt that is still prefilled."""

    def loaded(self, admitted: worker_pb2.Admitted) -> None:
        """Count a handoff that the decode worker has loaded."""

    def gap(self, engine_s: float, wire_s: float, received: float) -> None:
        """Take a sample of the time between two tokens."""

    def prefix_loaded(self, admitted: worker_pb2.Admitted) -> None:
        """Note that the prefill worker has loaded the prompt's beginning."""

    def prefilled(self) -> None:
        """Report that the prompt is prefilled, where no handoff follows."""

    def shared(self, blocks: int) -> None:
        """Report KV blocks of the decode worker that the request shares with others."""

    def close(self) -> None:
        """Release what the request holds: it has its outcome."""


class Leg:
    """A StreamListener. It ends once: with None when its phase or the request is complete, or with a Failure.

    After its end no message of the worker reaches the request.
    """

    def __init__(
        self,
        host: LegHost,
        sink: OutputSink,
        placement: Placement,
        phase: worker_pb2.Phase,
        *,
        alone_tokens: int = 0,
        more_alone: bool = False,
    ) -> None:
        """alone_tokens, more_alone: as in Start."""
        self._alone = alone_tokens, more_alone
        self._host = host
        self._sink = sink
        self._state = host.state
        self._phase = phase
        self._booked = _booked(placement, phase, alone=alone_tokens > 0)
        prefiller = placement.prefill or placement.decode
        self._worker = prefiller if phase == worker_pb2.PHASE_PREFILL else placement.decode
        self._kv_source = prefiller.worker_id
        # The decode worker cannot go on at once: the client's stream would stand still after its first token.
        self._holds = placement.waits and phase == worker_pb2.PHASE_PREFILL
        self._stream: WorkerStream | None = None
        self._fresh = True  # no output has come yet
        self._done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._saved_timer: asyncio.TimerHandle | None = None
        self._pulls = False  # a handoff is under way
        self._early = False  # it began while the prompt was prefilled, and nothing was heard against it
        self._runs = False
        self.request_id = self._state.request_id
        self.epoch = self._state.epoch
        self.saved: worker_pb2.Saved | None = None  # of a prefill: with a manifest

    async def run(self, manifest: handoff_pb2.Manifest | None, drafts: Sequence[int] = ()) -> Failure | None:
        """Start the phase on its worker and wait for its end.

        manifest: of the KV to pull; of a prefill, that of the prompt's beginning
        drafts: what may follow the tokens so far, as the prefill worker says
        """
        if manifest is None:
            self.call_off()
        elif self._phase == worker_pb2.PHASE_PREFILL:
            self._kv_source = manifest.worker_id
        self._runs = True
        start = self._start(self._phase, manifest)
        start.draft_token_ids.extend(drafts)
        self._pulls = manifest is not None
        try:
            stream = self._stream = await self._host.stream(self._worker)
            prefills = manifest is None or self._phase == worker_pb2.PHASE_PREFILL
            self._take_part(stream.speculative_method, prefills=prefills)
            if not self._done.done() and not stream.begin(self, start):
                return self._failure(Trouble.FULL, "its queue is full")
            return await self._done
        except WorkerUnreachable as error:
            return Failure(Trouble.UNREACHABLE, self._worker.worker_id, str(error))
        finally:
            if self._stream is not None:
                self._stream.forget(self)
            if self._saved_timer is not None:
                self._saved_timer.cancel()

    def load(self, stream: WorkerStream, manifest: handoff_pb2.Manifest) -> None:
        """Have this leg's worker begin to pull KV while the prompt is still prefilled. `run` goes on with it.

        Whatever happens to that: without it the whole handoff comes after the prefill.
        """
        self._early = stream.begin(self, self._start(worker_pb2.PHASE_LOAD, manifest))
        self._stream = stream

    def call_off(self) -> None:
        """Drop an early load that nobody will go on with. Does nothing without one, and once `run` began."""
        if self._early and not self._runs and self._stream is not None:
            self._early = False
            self._stream.forget(self)
            self._stream.abort(self.request_id)

    def _start(self, phase: worker_pb2.Phase, manifest: handoff_pb2.Manifest | None) -> worker_pb2.Start:
        return worker_pb2.Start(
            request_id=self.request_id,
            epoch=self.epoch,
            phase=phase,
            engine_request=self._state.engine_request,
            output_token_ids=self._state.tokens,
            manifest=manifest,
            traceparent=self._state.trace.traceparent,
            service=_service(self._state.service),
            party=self._state.party.number,
            alone_tokens=self._alone[0],
            more_alone=self._alone[1],
            prompt_tokens=self._booked[0],
            blocks=self._booked[1],
        )

    def _lost_early(self) -> bool:
        """Tell whether a message is of the early load alone; that is over then."""
        if self._runs:
            return False
        self._early = False
        if self._stream is not None:
            self._stream.forget(self)
        return True

    # -- the stream's calls

    def on_output(self, output: Any, clock_offset_s: float) -> None:
        """Pass one step's tokens on at once, unless the client's stream could not go on behind them."""
        if self._done.done() or not self._runs:
            return
        state = self._state
        if self._fresh:
            self._fresh = False
            self._begin(output, clock_offset_s)
            if self._booked[0] and self._phase == worker_pb2.PHASE_DECODE:
                self._host.prefilled()
        elif output.events is not None:
            self._sink.adapt(output, clock_offset_s)
        if output.spec_decode_metrics is not None:
            state.timings.drafts = output.spec_decode_metrics  # with every output: there may be no other
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
        self._host.gap(engine_s, wire_s, received)

    def on_begun(self, begun: worker_pb2.Begun) -> None:
        """Let the decode worker pull what is there."""
        if self._fresh:  # else the rest comes at once
            self._host.begun(begun.manifest)

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        """End the prefill: the prompt's KV cache is ready to be pulled, or could not be saved."""
        if saved.HasField("manifest"):
            self.saved = saved
            timings = self._state.timings
            timings.save_ms = saved.manifest.save_ms
            timings.chunks = saved.manifest.chunks
            if self._stream is not None and saved.manifest.saved_at_s:
                timings.saved = saved.manifest.saved_at_s + self._stream.clock_offset_s
            self._end(None)
        else:
            self._end(self._failure(Trouble.NOT_KEPT, f"it could not keep the KV cache: {saved.problem}"))

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        """Note that the KV cache was loaded; the request may still wait for a slot."""
        self._pulls = False
        if self._phase == worker_pb2.PHASE_PREFILL:
            self._host.prefix_loaded(admitted)
            return
        timings = self._state.timings
        timings.admitted = time.monotonic()
        timings.handoff = admitted
        timings.handoff_bytes = admitted.bytes
        timings.transport = admitted.transport
        self._host.loaded(admitted)

    def on_shared(self, shared: worker_pb2.Shared) -> None:
        """Report the KV blocks that the request shares with others of the same prefix."""
        self._host.shared(shared.blocks)

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        """End the leg: the worker has failed the request."""
        if self._lost_early() or failed.phase == worker_pb2.PHASE_LOAD:
            return  # all of it comes with the DECODE, which may have crossed with this
        trouble = _TROUBLE.get(failed.code, Trouble.ENGINE)
        self._end(self._failure(trouble, failed.message, engine_goes_on=failed.engine_goes_on))

    def on_lost(self, message: str) -> None:
        """End the leg: its stream has ended."""
        if self._lost_early():
            return
        self._end(self._failure(Trouble.LOST, f"its stream ended: {message}"))

    def on_source_lost(self, message: str) -> None:
        """End the leg if it still pulls from the lost worker: a pull's own deadline is much longer."""
        if not self._pulls or self._done.done():
            return
        if self._stream is not None:
            self._stream.abort(self.request_id)
        source = self._kv_source
        trouble = Trouble.PREFIX if self._phase == worker_pb2.PHASE_PREFILL else Trouble.HANDOFF
        self._end(Failure(trouble, source, f"worker {source}: lost with the KV cache: {message}"))

    # -- their consequences

    def _begin(self, output: Any, clock_offset_s: float) -> None:
        """Note what the leg's first output tells of its worker's time."""
        queued, began = self._sink.adapt(output, clock_offset_s)
        timings = self._state.timings
        if timings.first_token:
            timings.decode_began, timings.resumed = began, time.monotonic()
        elif self._stream is not None:
            timings.queued, timings.prefill_began = queued, began
            timings.prefill_ended = self._stream.put_out_at

    def _first_token(self, now: float) -> None:
        """Note the attempt's first token. A prefill's manifest is due then."""
        self._state.timings.first_token = now
        if self._phase == worker_pb2.PHASE_PREFILL:
            loop = asyncio.get_running_loop()
            self._saved_timer = loop.call_later(SAVED_TIMEOUT_S, self._no_manifest)

    def _hold(self, output: Any) -> None:
        self._state.timings.held = True
        self._sink.hold(output)

    def _no_manifest(self) -> None:
        self._end(self._failure(Trouble.NOT_KEPT, f"no manifest came within {SAVED_TIMEOUT_S:.0f} s"))

    def _finish(self, output: Any) -> None:
        """Take the engine's last output: the request's end, a prefill's token, or the engine's failure."""
        state = self._state
        reason = str(output.finish_reason)
        prefills, alone = self._phase == worker_pb2.PHASE_PREFILL, self._alone[0] > 0
        cut = (prefills or alone) and reason == "length" and not state.complete
        if reason in _ENGINE_ENDED_IT or cut:
            output.finish_reason = None
            output.stop_reason = None
            if output.new_token_ids:
                pass_on = self._hold if self._holds else self._sink.deliver
                pass_on(output)
            if reason in _ENGINE_ENDED_IT:
                message = f"its engine ended the request ({reason})"
                self._end(self._failure(Trouble.ENGINE, message, engine_goes_on=True))
            elif alone:
                self._end(None)
            return
        state.outcome = reason
        if prefills and self._stream is not None:
            self._stream.abort(self.request_id)  # nobody will pull the KV that it saved
        self._host.close()  # first: a client that has its last byte may send its next request at once
        self._sink.deliver(output)
        self._end(None)

    def _take_part(self, method: str, *, prefills: bool) -> None:
        decodes = self._phase == worker_pb2.PHASE_DECODE
        self._state.taken_by(self._worker.worker_id, prefills=prefills, decodes=decodes)
        if decodes:
            self._state.method = method

    def _failure(self, trouble: Trouble, message: str, *, engine_goes_on: bool = False) -> Failure:
        worker = self._worker.worker_id
        if self._phase == worker_pb2.PHASE_PREFILL and trouble in _NOT_LOADED:
            trouble = Trouble.PREFIX
        # A KV cache that cannot be loaded came from the prefill worker: that one's copy is lost or wrong.
        blamed = self._kv_source if trouble in (*_NOT_LOADED, Trouble.PREFIX) else worker
        return Failure(trouble, blamed, f"worker {worker}: {message}", engine_goes_on)

    def _end(self, failure: Failure | None) -> None:
        if not self._done.done():
            self._done.set_result(failure)
