"""Run the legs of one placement: a decode leg alone, or a prefill and a decode leg at the same time.

Both workers of a pair get their Start at once, with a key by which the decode worker fetches the KV from the
prefill worker. If both legs fail, `recovery.failure_of_pair` chooses the attempt's failure.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Protocol

from baton.protos import scheduler_pb2, worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.decode_leg import DecodeLeg
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.parts import RelayParts
from baton.services.router.prefill_leg import PrefillLeg
from baton.services.router.prefix import KEY_BYTES, Prefix, prefix_of
from baton.services.router.recovery import SOURCE_ENDS_S, Failure, failure_of_pair, may_be_the_source
from baton.services.router.sink import OutputSink
from baton.services.router.state import RequestState
from baton.services.router.stream import WorkerStream
from baton.tasks import LOOKS


class Owner(Protocol):
    """The relay, as seen from here."""

    state: RequestState

    def grow(self) -> bool:
        """Reserve memory in the journal for more output. Return False if there is none: the request ends."""

    def close(self) -> None:
        """Release the request's resources: it has its outcome."""


class Legs:
    """Run one placement; the LegHost of its legs. It keeps no reference to them: that would be a cycle."""

    def __init__(self, owner: Owner, sink: OutputSink, placement: Placement, parts: RelayParts) -> None:
        self.state = owner.state
        self._owner = owner
        self._sink = sink
        self._placement = placement
        self._parts = parts
        self._prefix: Prefix | None = None

    async def run(self) -> Failure | None:
        """Return the failure, or None if the request is over or has all its tokens."""
        if self._placement.prefill is None:
            return await DecodeLeg(self, self._sink, self._placement).run()
        return await self._run_pair(self._placement.prefill)

    async def run_alone(self, tokens: int, *, more: bool) -> Failure | None:
        """Generate `tokens` tokens with no other request in the engine. more: another suspect waits here."""
        leg = DecodeLeg(self, self._sink, self._placement, alone_tokens=tokens, more_alone=more)
        return await leg.run()

    async def _run_pair(self, prefiller: scheduler_pb2.Worker) -> Failure | None:
        state, key = self.state, secrets.token_bytes(KEY_BYTES)
        prefix = self._prefix = prefix_of(state, self._placement, self._parts)
        prefill = PrefillLeg(self, self._sink, self._placement, key, prefix.source if prefix else None)
        decode = None  # not needed if one token is left: the prefill worker generates it
        if state.tokens_to_generate > 1:
            source = worker_pb2.Source(
                worker_id=prefiller.worker_id,
                address=prefiller.address,
                request_id=state.request_id,
                key=key,
                tokens=state.tokens_to_prefill,
            )
            decode = DecodeLeg(self, self._sink, self._placement, source)
        try:
            if decode is not None:
                decode.start()  # first: its worker should be waiting when the KV is ready
            if prefix is not None:
                prefix.start(prefill.on_source_lost)
            prefill.start()
            failure = await _prefilled(prefill, decode)
            if state.over:  # the first token ended the request; a failure of the decode leg is moot
                failure = None
            if prefix is not None and prefill.over.done():
                prefix.over(prefill.failure)
            if failure is not None or state.over or state.complete or decode is None:
                prefill.stop()
                if decode is not None:
                    decode.stop()
                return failure
            self.prefilled()
            self._parts.metrics.saved(state)
            with prefill.watch(decode.on_source_lost):
                decode.go_on()
                return await decode.over
        finally:
            prefill.close()
            if decode is not None:
                decode.close()
            if prefix is not None:
                prefix.drop()

    # -- LegHost

    def reach(
        self, worker: scheduler_pb2.Worker, then: Callable[[WorkerStream | WorkerUnreachable], None]
    ) -> None:
        self._parts.pool.reach(worker, then)

    def grow(self) -> bool:
        return self._owner.grow()

    def loaded(self, admitted: worker_pb2.Admitted) -> None:
        prefill, decode = self._placement.prefill, self._placement.decode
        self._parts.metrics.admitted(admitted, self.state, decode.worker_id)
        self._parts.pairs.passed(((prefill or decode).worker_id, decode.worker_id))

    def gap(self, engine_s: float, wire_s: float, received: float) -> None:
        """Count a sample of the time between two tokens, and have the front end's part measured."""
        self._parts.metrics.gap("engine", engine_s)
        self._parts.metrics.gap("wire", wire_s)
        self._sink.watch(received)

    def prefix_loaded(self, admitted: worker_pb2.Admitted) -> None:
        if self._prefix is not None:
            self._prefix.loaded(admitted)

    def prefilled(self) -> None:
        self._parts.placements.prefilled(self._placement.attempt)

    def shared(self, blocks: int) -> None:
        self._parts.placements.shared(self._placement.attempt, blocks)

    def close(self) -> None:
        self._owner.close()


async def _prefilled(prefill: PrefillLeg, decode: DecodeLeg | None) -> Failure | None:
    """Wait until the prompt is prefilled or a leg has failed. Return the attempt's failure."""
    if decode is None:
        return await prefill.over
    await asyncio.wait((prefill.over, decode.over), return_when=asyncio.FIRST_COMPLETED)
    if not prefill.over.done() and may_be_the_source(decode.failure):
        for _ in range(LOOKS):  # not one timer: if the loop was stalled, the message may arrive with it
            await asyncio.wait((prefill.over,), timeout=SOURCE_ENDS_S / LOOKS)
    prefilled = prefill.over.done() and prefill.failure is None
    return failure_of_pair(prefill.failure, decode.failure, begun=prefilled or decode.begun)
