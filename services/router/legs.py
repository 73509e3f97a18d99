"""Run the legs of a placement: the phases of one attempt, each on one worker.

    PrefillLeg   prompt and first token, on the prefill worker
    DecodeLeg    the remaining tokens, on the decode worker; without a prefill worker the prompt too

Both workers of a pair get their Start at once, with a key by which the decode worker fetches the KV from the
prefill worker. The decode leg holds its worker's messages back until the prefill leg has succeeded: the
client gets tokens in order, and none of an attempt whose prefill failed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

from baton.protos import scheduler_pb2, worker_pb2
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.prefix import KEY_BYTES, prefix_of
from baton.services.router.recovery import (
    SOURCE_ENDS_S,
    TROUBLES,
    Failure,
    Trouble,
    failure_of_pair,
    may_be_the_source,
)
from baton.services.router.relay_parts import Owner
from baton.services.router.worker_stream import StreamListener, WorkerStream
from baton.tasks import LOOKS

# Limit from the first token to the report that the KV is saved. Both come from one step.
SAVED_TIMEOUT_S = 10.0
_ENGINE_ENDED_IT = ("abort", "error")

_NOT_LOADED = (Trouble.HANDOFF, Trouble.SOURCE)


async def run_placement(relay: Owner) -> Failure | None:
    """Run the relay's placement. Return the failure; None if the request has ended or has all its tokens."""
    state = relay.state
    if relay.placement.prefill is None:
        return await DecodeLeg(relay).run()
    prefill = PrefillLeg(relay)
    if state.tokens_to_generate <= 1:  # the prefill worker generates it
        failure = await prefill.run()
        prefill.settle_prefix()
        return None if state.over else failure
    decode = DecodeLeg(relay, prefill.source)
    try:
        decode.start()  # first: its worker should be waiting when the KV is ready
        prefill.start()
        failure = await _prefilled(prefill, decode)
        if state.over:  # the first token ended the request; a failure of the decode leg is moot
            failure = None
        prefill.settle_prefix()
        if failure is not None or state.over or state.complete:
            prefill.stop()
            decode.stop()
            return failure
        relay.parts.placements.reporter.prefilled(relay.placement.attempt)
        relay.parts.metrics.saved(state)
        with prefill.watch(decode.on_source_lost):
            decode.go_on()
            return await decode.over
    finally:
        prefill.close()
        decode.close()


async def _prefilled(prefill: PrefillLeg, decode: DecodeLeg) -> Failure | None:
    """Wait until the prompt is prefilled or a leg has failed. Return the attempt's failure."""
    await asyncio.wait((prefill.over, decode.over), return_when=asyncio.FIRST_COMPLETED)
    if not prefill.over.done() and may_be_the_source(decode.failure):
        for _ in range(LOOKS):  # not one timer: if the loop was stalled, the message may arrive with it
            await asyncio.wait((prefill.over,), timeout=SOURCE_ENDS_S / LOOKS)
    prefilled = prefill.over.done() and prefill.failure is None
    return failure_of_pair(prefill.failure, decode.failure, begun=prefilled or decode.begun)


class Leg(StreamListener):
    """A StreamListener whose future `over` gets its result: None for success, or a Failure.

    From then on the worker's messages are ignored. A leg that was started must be closed.
    """

    _PHASE: ClassVar[worker_pb2.Phase]
    _SOURCE_LOST: ClassVar[Trouble]

    def __init__(
        self, relay: Owner, worker: scheduler_pb2.Worker, source: worker_pb2.Source | None, **more: Any
    ) -> None:
        """Build the leg's Start. source: the worker whose KV it loads; more: further fields of the Start."""
        state = self._state = relay.state
        self._relay = relay
        self._parts = relay.parts
        self._sink = relay.sink
        self._worker = worker
        self._kv_source = source.worker_id if source is not None else worker.worker_id
        self._pulls = source is not None  # a handoff is under way
        self._deferred: list[Callable[[], None]] | None = None  # calls held back until the prefill succeeds
        self._holds = False  # each output is held back until the next one
        self._stream: WorkerStream | None = None
        self._fresh = True  # no output has come yet
        self._prefills = True  # it computes the prompt
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
            service=state.service_message,
            party=state.party.number,
            source=source,
            left_s=max(0.001, state.deadline - time.monotonic()),
            **more,
        )

    @property
    def failure(self) -> Failure | None:
        return self.over.result() if self.over.done() and not self.over.cancelled() else None

    def start(self) -> None:
        """Send the Start as soon as the worker is connected."""
        self._parts.pool.reach(self._worker, self._reached)

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
        if self._deferred:
            self._deferred.clear()
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
        if self._deferred is None:
            self._take_part()
        images = self._state.images if self._prefills else ()
        if not stream.begin(self, start, images):
            self._end(self._failure(Trouble.FULL, "its queue is full"))

    # -- StreamListener

    def on_output(self, output: Any, clock_offset_s: float) -> None:
        """Deliver one step's tokens, unless they must be held back."""
        if self.over.done():
            return
        if self._deferred is not None:
            self._deferred.append(partial(self.on_output, output, clock_offset_s))
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
            if state.outgrown and not self._relay.grow():
                return
        output.request_id = state.frontend_id
        if output.finish_reason is not None:
            self._finish(output)
        elif self._holds:
            self._hold(output)
        else:
            self._sink.deliver(output)

    def on_gap(self, engine_s: float, wire_s: float, received: float) -> None:
        if self._deferred is None:
            self._parts.metrics.gap("engine", engine_s)
            self._parts.metrics.gap("wire", wire_s)
            self._sink.watch(received)  # measures the front end's part

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        trouble = TROUBLES.get(failed.code, Trouble.ENGINE)
        if trouble is Trouble.MEDIA and self._stream is not None:
            self._stream.sent.forget_all(self._state.images)
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

    def _take_part(self) -> None:
        decodes = self._PHASE == worker_pb2.PHASE_DECODE
        self._state.taken_by(self._worker.worker_id, prefills=self._prefills, decodes=decodes)
        if decodes and self._stream is not None:
            self._state.method = self._stream.speculative_method

    def _first_output(self, output: Any, clock_offset_s: float) -> None:
        queued, began = self._sink.adapt(output, clock_offset_s)
        timings = self._state.timings
        if timings.first_token:
            timings.decode_began, timings.resumed = began, time.monotonic()
        elif self._stream is not None:
            timings.queued, timings.prefill_began = queued, began
            timings.prefill_ended = self._stream.emitted_at

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

    def _cut(self) -> bool:
        """Handle the last token that this leg asked for. Return False if the request is complete."""
        raise NotImplementedError

    def _complete(self, output: Any, reason: str) -> None:
        self._state.outcome = reason
        self._relay.close()  # before the last token: the client may send its next request at once
        self._sink.deliver(output)
        self._end(None)

    def _failure(self, trouble: Trouble, message: str, *, engine_goes_on: bool = False) -> Failure:
        # If KV cannot be loaded, blame the worker it came from.
        blamed = self._kv_source if trouble in _NOT_LOADED else self._worker.worker_id
        return Failure(trouble, blamed, f"worker {self._worker.worker_id}: {message}", engine_goes_on)

    def _end(self, failure: Failure | None) -> None:
        if not self.over.done():
            self.over.set_result(failure)


class PrefillLeg(Leg):
    """A leg that succeeds when the KV is saved, or when the first token ends the request."""

    _PHASE = worker_pb2.PHASE_PREFILL
    _SOURCE_LOST = Trouble.PREFIX

    def __init__(self, relay: Owner) -> None:
        state, placement, key = relay.state, relay.placement, secrets.token_bytes(KEY_BYTES)
        worker = placement.prefill or placement.decode
        self.source = worker_pb2.Source(  # the decode worker will load from it
            worker_id=worker.worker_id,
            address=worker.address,
            request_id=state.request_id,
            key=key,
            tokens=state.tokens_to_prefill,
        )
        self._prefix = prefix_of(state, placement, relay.parts)
        pulled = self._prefix.source if self._prefix is not None else None
        super().__init__(relay, worker, pulled, key=key, prompt_tokens=placement.prompt_tokens)
        # If the decode worker has no slot yet, the stream would stall after its first token.
        self._holds = placement.waits
        self._saved_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._prefix is not None:
            self._prefix.start(self.on_source_lost)
        super().start()

    def close(self) -> None:
        super().close()
        if self._saved_timer is not None:
            self._saved_timer.cancel()
        if self._prefix is not None:
            self._prefix.drop()

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        if self.over.done():
            return
        if saved.problem:
            self._end(self._failure(Trouble.NOT_KEPT, f"it could not save the KV cache: {saved.problem}"))
            return
        timings = self._state.timings
        timings.save_ms = saved.save_ms
        timings.chunks = saved.chunks
        if self._stream is not None and saved.saved_at_s:
            timings.saved = saved.saved_at_s + self._stream.clock_offset_s
        self._end(None)

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        self._pulls = False
        if self._prefix is not None:
            self._prefix.loaded(admitted)

    def _first_token(self, now: float) -> None:
        """Record the first token, and start the timeout for the report that the KV is saved."""
        super()._first_token(now)
        loop = asyncio.get_running_loop()
        self._saved_timer = loop.call_later(SAVED_TIMEOUT_S, self._not_saved)

    def _not_saved(self) -> None:
        message = f"it did not report within {SAVED_TIMEOUT_S:.0f} s that it saved the KV cache"
        self._end(self._failure(Trouble.NOT_KEPT, message))

    def _cut(self) -> bool:
        return True  # a prefill is always cut to one token

    def _complete(self, output: Any, reason: str) -> None:
        if self._stream is not None:
            self._stream.abort(self.request_id)  # release its saved KV: no worker will pull it
        super()._complete(output, reason)

    def _failure(self, trouble: Trouble, message: str, *, engine_goes_on: bool = False) -> Failure:
        failure = super()._failure(trouble, message, engine_goes_on=engine_goes_on)
        if trouble in _NOT_LOADED:
            return Failure(Trouble.PREFIX, failure.worker_id, failure.message)
        return failure

    def settle_prefix(self) -> None:
        """Record how the prefix pull ended. In `_end` it is too early: the same reply may report the load."""
        if self._prefix is not None and self.over.done():
            self._prefix.over(self.failure)


class DecodeLeg(Leg):
    """A leg that succeeds when the request is complete. With a source it waits for the prefill (`go_on`)."""

    _PHASE = worker_pb2.PHASE_DECODE
    _SOURCE_LOST = Trouble.HANDOFF

    def __init__(
        self,
        relay: Owner,
        source: worker_pb2.Source | None = None,
        *,
        alone_tokens: int = 0,
        more_alone: bool = False,
    ) -> None:
        """source: the worker that prefills the prompt; alone_tokens, more_alone: as in Start."""
        placement = relay.placement
        self._attempt = placement.attempt  # as booked; the Start may have a later epoch
        self._alone = alone_tokens > 0
        self._computes = 0 if placement.prefill or self._alone else placement.prompt_tokens
        super().__init__(
            relay,
            placement.decode,
            source,
            alone_tokens=alone_tokens,
            more_alone=more_alone,
            prompt_tokens=self._computes,
            blocks=0 if self._alone else placement.blocks,
        )
        if source is not None:
            self._prefills, self._deferred = False, []

    @property
    def begun(self) -> bool:
        """Whether its worker has received the prompt's KV: its messages wait here."""
        return bool(self._deferred)

    def go_on(self) -> None:
        """Pass on the waiting messages, now that the prompt is prefilled, and later ones directly."""
        waited, self._deferred = self._deferred or [], None
        self._take_part()
        for take in waited:
            take()

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        self._pulls = False
        self._defer(partial(self._admitted, admitted, time.monotonic()))

    def on_shared(self, shared: worker_pb2.Shared) -> None:
        self._defer(partial(self._parts.placements.reporter.shared, self._attempt, shared.blocks))

    def _defer(self, take: Callable[[], None]) -> None:
        if self._deferred is None:
            take()
        elif not self.over.done():
            self._deferred.append(take)

    def _admitted(self, admitted: worker_pb2.Admitted, now: float) -> None:
        timings = self._state.timings
        timings.admitted = now
        timings.handoff = admitted
        self._parts.metrics.admitted(admitted, self._state, self._worker.worker_id)
        self._parts.placements.pairs.passed((self._kv_source, self._worker.worker_id))

    def _first_output(self, output: Any, clock_offset_s: float) -> None:
        super()._first_output(output, clock_offset_s)
        if self._computes:
            self._parts.placements.reporter.prefilled(self._attempt)

    def _cut(self) -> bool:
        if self._alone:
            self._end(None)
        return self._alone
