"""One phase of one attempt on one worker: what its stream says, and what that means for the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.protos import handoff_pb2, scheduler_pb2, worker_pb2
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.recovery import Failure, Trouble

if TYPE_CHECKING:
    from baton.services.router.relay import Relay

# From a prompt's first token to its manifest. They come from the same step: later the KV is as good as lost.
SAVED_TIMEOUT_S = 10.0
_ENGINE_ENDED_IT = ("abort", "error")

_TROUBLE = {
    worker_pb2.Failed.CODE_HANDOFF: Trouble.HANDOFF,
    worker_pb2.Failed.CODE_DRAINING: Trouble.REFUSED,
    worker_pb2.Failed.CODE_FULL: Trouble.REFUSED,
    worker_pb2.Failed.CODE_INVALID: Trouble.INVALID,
    worker_pb2.Failed.CODE_STALE: Trouble.STALE,
    worker_pb2.Failed.CODE_ENGINE: Trouble.ENGINE,
}


class Leg:
    """Ends once: with None when it did what it should or the request is over, else with a Failure.

    After its end nothing that the worker still says reaches the request.
    """

    def __init__(self, relay: Relay, worker: scheduler_pb2.Worker, phase: worker_pb2.Phase) -> None:
        self._relay = relay
        self._state = relay.state
        self._worker = worker
        self._phase = phase
        self._fresh = True  # no output has come yet
        self._done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._saved_timer: asyncio.TimerHandle | None = None
        holds = relay.waits_for_slot and phase == worker_pb2.PHASE_PREFILL
        self._pass_on = relay.hold if holds else relay.deliver
        self.request_id = relay.state.request_id
        self.epoch = relay.state.epoch
        self.manifest: handoff_pb2.Manifest | None = None
        self._pulls = False  # a handoff is under way

    async def run(self, manifest: handoff_pb2.Manifest | None) -> Failure | None:
        """Start and wait for the phase's end."""
        start = worker_pb2.Start(
            request_id=self.request_id,
            epoch=self.epoch,
            phase=self._phase,
            engine_request=self._state.engine_request,
            output_token_ids=self._state.tokens,
            manifest=manifest,
        )
        self._pulls = manifest is not None
        forget: Callable[[Leg], None] = _nothing
        try:
            stream = await self._relay.stream(self._worker)
            forget = stream.forget
            self._take_part(stream.speculative_method, reads=manifest is None)
            if not stream.begin(self, start):
                return self._failure(Trouble.REFUSED, "its queue is full")
            return await self._done
        except WorkerUnreachable as error:
            return Failure(Trouble.UNREACHABLE, self._worker.worker_id, str(error))
        finally:
            forget(self)
            if self._saved_timer is not None:
                self._saved_timer.cancel()

    # -- from the stream

    def on_output(self, output: Any, clock_offset_s: float) -> None:
        """One step's tokens: passed on at once, unless the stream could not go on behind them."""
        if self._done.done():
            return
        state = self._state
        if self._fresh or output.events is not None:
            self._fresh = False
            self._relay.adapt(output, clock_offset_s)
        if output.spec_decode_metrics is not None:
            state.timings.drafts = output.spec_decode_metrics  # with every output: there may be no other
            output.spec_decode_metrics = None  # vLLM's front end would show it to every client
        tokens = output.new_token_ids
        if tokens:
            now = state.timings.last_token = time.monotonic()
            if not state.timings.first_token:
                self._first_token(now)
            state.tokens.extend(tokens)
            if state.outgrown and not self._relay.grow():
                return
        if output.finish_reason is None:
            self._pass_on(output)
        else:
            self._finish(output)

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        """The prompt's KV cache waits to be pulled, or could not be kept."""
        if saved.HasField("manifest"):
            self.manifest = saved.manifest
            self._end(None)
        else:
            self._end(self._failure(Trouble.NOT_KEPT, f"it could not keep the KV cache: {saved.problem}"))

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        """The KV cache was loaded; the request may wait for a slot still."""
        self._pulls = False
        timings = self._state.timings
        timings.admitted = time.monotonic()
        timings.handoff_bytes = admitted.bytes
        timings.transport = admitted.transport
        self._relay.admitted(admitted)

    def on_shared(self, shared: worker_pb2.Shared) -> None:
        """The answer has begun beside others with the same beginning."""
        self._relay.shared(shared.blocks)

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        """The attempt ended here without an answer."""
        self._end(self._failure(_TROUBLE.get(failed.code, Trouble.ENGINE), failed.message))

    def on_lost(self, message: str) -> None:
        """The stream ended under it."""
        self._end(self._failure(Trouble.LOST, f"its stream ended: {message}"))

    def on_source_lost(self, message: str) -> None:
        """Who saved the KV cache is lost, and it is not here yet: a pull's own deadline is much longer."""
        if not self._pulls or self._done.done():
            return
        self._relay.stop_pulling()
        reader = self._relay.reader_id
        self._end(Failure(Trouble.HANDOFF, reader, f"worker {reader}: lost with the KV cache: {message}"))

    # -- what follows from it

    def _first_token(self, now: float) -> None:
        """Of this attempt."""
        self._state.timings.first_token = now
        if self._phase == worker_pb2.PHASE_PREFILL:
            loop = asyncio.get_running_loop()
            self._saved_timer = loop.call_later(SAVED_TIMEOUT_S, self._no_manifest)

    def _no_manifest(self) -> None:
        self._end(self._failure(Trouble.NOT_KEPT, f"no manifest came within {SAVED_TIMEOUT_S:.0f} s"))

    def _finish(self, output: Any) -> None:
        """The engine has ended the request: for good, at its one token, or as it failed."""
        state = self._state
        reason = str(output.finish_reason)
        reading = self._phase == worker_pb2.PHASE_PREFILL
        if reason in _ENGINE_ENDED_IT or (reading and reason == "length" and not state.complete):
            output.finish_reason = None
            output.stop_reason = None
            if output.new_token_ids:
                self._pass_on(output)
            if reason in _ENGINE_ENDED_IT:
                self._end(self._failure(Trouble.ENGINE, f"its engine ended the request ({reason})"))
            return
        state.outcome = reason
        if reading:
            self._relay.release_saved()
        self._relay.close()  # first: a client that has its last byte may send its next request at once
        self._relay.deliver(output)
        self._end(None)

    def _take_part(self, method: str, *, reads: bool) -> None:
        writes = self._phase == worker_pb2.PHASE_DECODE
        self._state.taken_by(self._worker.worker_id, reads=reads, writes=writes)
        if writes:
            self._state.method = method

    def _failure(self, trouble: Trouble, message: str) -> Failure:
        worker = self._worker.worker_id
        # A KV cache that cannot be loaded came from the other side: that one's is lost or wrong.
        blamed = self._relay.reader_id if trouble is Trouble.HANDOFF else worker
        return Failure(trouble, blamed, f"worker {worker}: {message}")

    def _end(self, failure: Failure | None) -> None:
        if not self._done.done():
            self._done.set_result(failure)


def _nothing(leg: Leg) -> None:
    """No stream has heard of the leg yet."""
    del leg
