"""Run the legs of one placement: one worker's alone, or two workers' at the same time.

The router tells both workers of a pair at once, and gives them a key by which the second finds the first. The
handoff is between those two. Their ends meet here: if both fail, `recovery.failure_of_pair` says which
failure is the attempt's.
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
    """The part of a request's relay that its placements use."""

    state: RequestState

    def grow(self) -> bool:
        """Get the output more room in the journal. Return False when there is none: the request has ended."""

    def close(self) -> None:
        """Release what the request holds: it has its outcome."""


class Legs:
    """Run a placement once, as the LegHost of its legs. No attribute holds them: that would be a cycle."""

    def __init__(self, owner: Owner, sink: OutputSink, placement: Placement, parts: RelayParts) -> None:
        self.state = owner.state
        self._owner = owner
        self._sink = sink
        self._placement = placement
        self._parts = parts
        self._prefix: Prefix | None = None

    async def run(self) -> Failure | None:
        """Return None if the request is over or has all its tokens."""
        if self._placement.prefill is None:
            return await DecodeLeg(self, self._sink, self._placement).run()
        return await self._run_pair(self._placement.prefill)

    async def run_alone(self, tokens: int, *, more: bool) -> Failure | None:
        """Run `tokens` tokens with no other request beside it. more: this router has another such request."""
        leg = DecodeLeg(self, self._sink, self._placement, alone_tokens=tokens, more_alone=more)
        return await leg.run()

    async def _run_pair(self, prefiller: scheduler_pb2.Worker) -> Failure | None:
        state, key = self.state, secrets.token_bytes(KEY_BYTES)
        prefix = self._prefix = prefix_of(state, self._placement, self._parts)
        prefill = PrefillLeg(self, self._sink, self._placement, key, prefix.source if prefix else None)
        decode = None  # if one token is left, the prefill's is the last
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
                decode.start()  # first: its worker has to be ready when the other one is
            if prefix is not None:
                prefix.start(prefill.on_source_lost)
            prefill.start()
            failure = await _prefilled(prefill, decode)
            if state.over:  # ended by the prompt's first token, whatever the decode worker says of that
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

    # -- for the legs (LegHost)

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
        """Take a sample of the time between two tokens, and have the front end's part measured."""
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
    """Wait until the prompt is prefilled, or one of the legs has failed. Return the attempt's failure."""
    if decode is None:
        return await prefill.over
    await asyncio.wait((prefill.over, decode.over), return_when=asyncio.FIRST_COMPLETED)
    if not prefill.over.done() and may_be_the_source(decode.failure):
        for _ in range(LOOKS):  # not one timer: the leg's own message and the timer may come due together
            await asyncio.wait((prefill.over,), timeout=SOURCE_ENDS_S / LOOKS)
    prefilled = prefill.over.done() and prefill.failure is None
    return failure_of_pair(prefill.failure, decode.failure, begun=prefilled or decode.begun)
