"""Run the prefill of a request that another worker decodes."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.protos import worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.leg import NOT_LOADED, Leg, LegHost
from baton.services.router.recovery import Failure, Trouble
from baton.services.router.sink import OutputSink
from baton.services.router.stream import WorkerStream

# Limit from the first token to the report that the KV is saved. Both come from one step.
SAVED_TIMEOUT_S = 10.0


class PrefillLeg(Leg):
    """A leg that succeeds when the KV is saved, or when the first token ends the request."""

    _PHASE = worker_pb2.PHASE_PREFILL
    _SOURCE_LOST = Trouble.PREFIX

    def __init__(
        self,
        host: LegHost,
        sink: OutputSink,
        placement: Placement,
        key: bytes,
        prefix: worker_pb2.Source | None = None,
    ) -> None:
        """key: what the decode worker has to present; prefix: the source of the prompt's first blocks."""
        worker = placement.prefill or placement.decode
        super().__init__(host, sink, worker, prefix, key=key, prompt_tokens=placement.prompt_tokens)
        # If the decode worker has no slot yet, the stream would stall after its first token.
        self._holds = placement.waits
        self._saved_timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        super().close()
        if self._saved_timer is not None:
            self._saved_timer.cancel()

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        if self.over.done():
            return
        if saved.problem:
            self._end(self._failure(Trouble.NOT_KEPT, f"it could not keep the KV cache: {saved.problem}"))
            return
        timings = self._state.timings
        timings.save_ms = saved.save_ms
        timings.chunks = saved.chunks
        if self._stream is not None and saved.saved_at_s:
            timings.saved = saved.saved_at_s + self._stream.clock_offset_s
        self._end(None)

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        """Handle the report that the prompt's first blocks were loaded."""
        self._pulls = False
        self._host.prefix_loaded(admitted)

    def on_shared(self, shared: worker_pb2.Shared) -> None:
        """Do nothing: blocks are booked at the decode worker."""

    def _take_part(self, stream: WorkerStream) -> None:
        del stream
        self._state.taken_by(self._worker.worker_id, prefills=True, decodes=False)

    def _first_token(self, now: float) -> None:
        """Record the first token, and start the timeout for the report that the KV is saved."""
        super()._first_token(now)
        loop = asyncio.get_running_loop()
        self._saved_timer = loop.call_later(SAVED_TIMEOUT_S, self._not_saved)

    def _not_saved(self) -> None:
        message = f"it did not say within {SAVED_TIMEOUT_S:.0f} s that it keeps the KV cache"
        self._end(self._failure(Trouble.NOT_KEPT, message))

    def _cut(self) -> bool:
        return True  # a prefill is always cut to one token

    def _complete(self, output: Any, reason: str) -> None:
        if self._stream is not None:
            self._stream.abort(self.request_id)  # release its saved KV: no worker will pull it
        super()._complete(output, reason)

    def _failure(self, trouble: Trouble, message: str, *, engine_goes_on: bool = False) -> Failure:
        failure = super()._failure(trouble, message, engine_goes_on=engine_goes_on)
        if trouble in NOT_LOADED:
            return Failure(Trouble.PREFIX, failure.worker_id, failure.message)
        return failure
