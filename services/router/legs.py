"""Run the legs of a placement: the phases of one attempt, each on one worker.

    PrefillLeg   prompt and first token, on the prefill worker
    DecodeLeg    the remaining tokens, on the decode worker; also the prompt if there is no prefill worker

Both workers of a pair get their Start at once, with a key that lets the decode worker fetch the KV from the
prefill worker. The decode leg holds its worker's outputs back until the prefill leg has succeeded: the
client gets tokens in order, and none from an attempt whose prefill failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from baton.protos import worker_pb2
from baton.services.router.encodes import Encodes
from baton.services.router.leg import NOT_LOADED, Leg
from baton.services.router.prefix import prefix_of, source_of
from baton.services.router.recovery import SOURCE_ENDS_S, Failure, Trouble, failure_of_pair, may_be_the_source
from baton.services.router.relay_parts import Owner
from baton.tasks import LOOKS

# Time limit from the first token to the report that the KV is saved. Both come from one step.
SAVED_TIMEOUT_S = 10.0


async def run_placement(relay: Owner) -> Failure | None:
    """Run the relay's placement. Return the failure; None if the request has ended or has all its tokens."""
    encodes = Encodes(relay)
    try:
        if relay.state.images:
            await encodes.place()
        if relay.placement.prefill is None:
            return await DecodeLeg(relay, encodes=encodes).run()
        return await _run_pair(relay, encodes)
    finally:
        encodes.close()


async def _run_pair(relay: Owner, encodes: Encodes) -> Failure | None:
    state = relay.state
    prefill = PrefillLeg(relay, encodes)
    if state.tokens_to_generate <= 1:  # the prefill worker generates the only token
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
        relay.parts.placements.reports.prefilled(relay.placement.attempt)
        relay.parts.metrics.saved(state)
        with prefill.watch(decode.on_source_lost):
            decode.go_on()
            return await decode.over
    finally:
        prefill.close()
        decode.close()


async def _prefilled(prefill: PrefillLeg, decode: DecodeLeg) -> Failure | None:
    await asyncio.wait((prefill.over, decode.over), return_when=asyncio.FIRST_COMPLETED)
    if not prefill.over.done() and may_be_the_source(decode.failure):
        for _ in range(LOOKS):  # after a stall of the loop, one long wait would end before messages are read
            await asyncio.wait((prefill.over,), timeout=SOURCE_ENDS_S / LOOKS)
    prefilled = prefill.over.done() and prefill.failure is None
    return failure_of_pair(prefill.failure, decode.failure, begun=prefilled or decode.has_answered)


class PrefillLeg(Leg):
    """A leg that succeeds when the KV is saved, or when the first token ends the request."""

    _PHASE = worker_pb2.PHASE_PREFILL
    _SOURCE_LOST = Trouble.PREFIX

    def __init__(self, relay: Owner, encodes: Encodes) -> None:
        state, placement = relay.state, relay.placement
        worker = placement.prefill or placement.decode
        self.source = source_of(worker, state.request_id, state.tokens_to_prefill)  # for the decode worker
        self._prefix = prefix_of(state, placement, relay.parts)
        pulled = self._prefix.source if self._prefix is not None else None
        fields = {"key": self.source.key, "prompt_tokens": placement.prompt_tokens}
        super().__init__(relay, worker, pulled, encodes, **fields)
        # Hold the first token if the decode worker has no slot yet: the stream would stall after it.
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
        if trouble in NOT_LOADED:
            return Failure(Trouble.PREFIX, failure.worker_id, failure.message)
        return failure

    def settle_prefix(self) -> None:
        """Record how the prefix pull ended. `_end` is too early: the same reply may report the load."""
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
        encodes: Encodes | None = None,
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
            encodes,
            alone_tokens=alone_tokens,
            more_alone=more_alone,
            prompt_tokens=self._computes,
            blocks=0 if self._alone else placement.blocks,
        )
        if source is not None:
            self._prefills, self._deferred = False, []

    @property
    def has_answered(self) -> bool:
        """Whether its worker has received the prompt's KV: its messages are waiting here."""
        return bool(self._deferred)

    def go_on(self) -> None:
        """Pass on the deferred messages, now that the prompt is prefilled, and later messages directly."""
        waited, self._deferred = self._deferred or [], None
        self._take_part()
        for take in waited:
            take()

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        self._pulls = False
        self._defer(partial(self._admitted, admitted, time.monotonic()))

    def on_shared(self, shared: worker_pb2.Shared) -> None:
        self._defer(partial(self._parts.placements.reports.shared, self._attempt, shared.blocks))

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
            self._parts.placements.reports.prefilled(self._attempt)

    def _cut(self) -> bool:
        if self._alone:
            self._end(None)
        return self._alone
