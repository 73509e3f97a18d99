"""One phase of an attempt on one worker: what the legs in legs.py share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

from baton.protos import scheduler_pb2, worker_pb2
from baton.services.router.encodes import Encodes
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.recovery import TROUBLES, Failure, Trouble
from baton.services.router.relay_parts import Owner
from baton.services.router.worker_stream import StreamListener, WorkerStream

_ENGINE_ENDED_IT = ("abort", "error")
NOT_LOADED = (Trouble.HANDOFF, Trouble.SOURCE)


class Leg(StreamListener):
    """A StreamListener whose future `over` gets its result: None for success, or a Failure.

    From then on the worker's messages are ignored. A leg that was started must be closed.
    """

    _PHASE: ClassVar[worker_pb2.Phase]
    _SOURCE_LOST: ClassVar[Trouble]

    def __init__(
        self,
        relay: Owner,
        worker: scheduler_pb2.Worker,
        source: worker_pb2.Source | None,
        encodes: Encodes | None = None,
        **more: Any,
    ) -> None:
        """Build the leg's Start.

        source: the worker whose KV it loads; encodes: the prompt's, if this leg computes it; more: further
        fields of the Start
        """
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
        self._fresh = True  # no output has arrived yet
        self._prefills = True  # this leg computes the prompt
        self._encodes = encodes
        self.request_id = state.request_id
        self.epoch = state.epoch
        self.over: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._unsent: worker_pb2.Start | None = state.start(
            self._PHASE,
            request_id=state.request_id,
            epoch=state.epoch,
            engine_request=state.engine_request,
            output_token_ids=state.tokens,
            service=state.service_message,
            party=state.party.number,
            source=source,
            encoded=encodes.encoded if encodes is not None else (),
            **more,
        )

    @property
    def failure(self) -> Failure | None:
        return self.over.result() if self.over.done() and not self.over.cancelled() else None

    def start(self) -> None:
        """Send the Start as soon as the worker is connected."""
        if self._encodes is not None:
            self._encodes.start(self._encode_failed)
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
        """Call `on_lost` if this leg's worker is lost inside the block, while its KV is being pulled."""
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
        images = self._state.images if self._encodes is None else self._encodes.others
        if not stream.begin(self, start, images if self._prefills else ()):
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
            output.spec_decode_metrics = None  # vLLM's front end would show the metrics to the client
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
            self._stream.sent.forget_all(failed.images or [one.identifier for one in self._state.images])
            if self._encodes is not None and self._encodes.did_not_come(failed.images):
                trouble = Trouble.ENCODE
        self._end(self._failure(trouble, failed.message, engine_goes_on=failed.engine_goes_on))

    def on_lost(self, message: str) -> None:
        self._end(self._failure(Trouble.LOST, f"its stream ended: {message}"))

    def on_source_lost(self, message: str) -> None:
        """Fail if the KV is still being pulled from the lost worker: the pull's deadline is much later."""
        if not self._pulls or self.over.done():
            return
        if self._stream is not None:
            self._stream.abort(self.request_id)
        source = self._kv_source
        self._end(Failure(self._SOURCE_LOST, source, f"worker {source}: lost with the KV cache: {message}"))

    # -- helpers

    def _encode_failed(self, failure: Failure) -> None:
        """End the leg at once: its worker would wait for the embeddings much longer."""
        if self.over.done():
            return
        if self._stream is not None:
            self._stream.abort(self.request_id)
        self._end(failure)

    def _take_part(self) -> None:
        decodes = self._PHASE == worker_pb2.PHASE_DECODE
        self._state.taken_by(self._worker.worker_id, prefills=self._prefills, decodes=decodes)
        if decodes and self._stream is not None:
            self._state.method = self._stream.speculative_method

    def _first_output(self, output: Any, clock_offset_s: float) -> None:
        if self._encodes is not None:
            self._encodes.came()
        queued, began = self._sink.adapt(output, clock_offset_s)
        timings = self._state.timings
        if timings.first_token:
            timings.resumed = time.monotonic()
        elif self._stream is not None:
            timings.queued, timings.prefill_began = queued, began
            timings.prefill_ended = self._stream.emitted_at

    def _first_token(self, now: float) -> None:
        self._state.timings.first_token = now

    def _hold(self, output: Any) -> None:
        self._state.timings.held = True
        self._sink.hold(output)

    def _finish(self, output: Any) -> None:
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
        # If KV cannot be loaded, blame the worker that it was to come from.
        blamed = self._kv_source if trouble in NOT_LOADED else self._worker.worker_id
        return Failure(trouble, blamed, f"worker {self._worker.worker_id}: {message}", engine_goes_on)

    def _end(self, failure: Failure | None) -> None:
        if not self.over.done():
            self.over.set_result(failure)
