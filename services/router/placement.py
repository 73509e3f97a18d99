"""Placements, from the scheduler or without one, and what it is told of them afterwards."""

from __future__ import annotations

import asyncio
import time

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import Placement, SchedulerClient
from baton.scheduler.errors import NoCapacity, Refused, SchedulerUnavailable
from baton.scheduler.types import Attempt
from baton.services.engine.args import VLLM_VERSION
from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics
from baton.services.router.state import RequestState


class Placements:
    """Places on behalf of requests, and tells the scheduler the end of every epoch that was used."""

    def __init__(self, client: SchedulerClient, metrics: RouterMetrics) -> None:
        self._client = client
        self._metrics = metrics

    async def place(self, state: RequestState, suspects: set[str]) -> Placement:
        """The next epoch's placement. Raises NotAdmitted; nothing is held then, nor when it is cancelled.

        `suspects` are avoided as long as there are others: a stream may break without its worker.
        """
        began = time.monotonic()
        try:
            placement = await self._ask(state, state.excluded | suspects)
        except NoCapacity as no:
            if not suspects - state.excluded:
                raise _refused(no) from None
            try:
                placement = await self._ask(state, state.excluded)
            except NoCapacity as still_no:
                raise _refused(still_no) from None
        state.model_fingerprint = placement.decode.model_fingerprint
        self._metrics.placed(placement, time.monotonic() - began)
        return placement

    def prefilled(self, attempt: Attempt) -> None:
        """The prompt was read: the prefill side's reservation ends."""
        self._client.reporter.prefilled(attempt)

    def shared(self, attempt: Attempt, blocks: int) -> None:
        """So many KV blocks of the decode worker need no room of their own."""
        self._client.reporter.shared(attempt, blocks)

    def finished(self, state: RequestState, attempt: Attempt, outcome: str) -> None:
        """The attempt is over: both reservations end, and the scheduler learns what it cost."""
        self._client.reporter.finished(attempt, outcome, cost_of(state))

    async def _ask(self, state: RequestState, exclude: set[str]) -> Placement:
        """The scheduler's placement, or with no scheduler at hand one from the last snapshot.

        Raises NoCapacity and NotAdmitted.
        """
        try:
            return await self._ask_scheduler(state, exclude)
        except NoCapacity as no:
            if not no.settling or no.code == pb.Rejection.CODE_STALE_EPOCH:
                raise
            try:
                return self._place_alone(state, exclude)
            except SchedulerUnavailable:
                raise no from None
        except SchedulerUnavailable as error:
            try:
                return self._place_alone(state, exclude)
            except SchedulerUnavailable:
                raise NotAdmitted(error.message, Why.UNAVAILABLE, error.retry_after_s) from None
        except Refused as error:
            raise NotAdmitted(f"the scheduler refuses the request: {error}", Why.REFUSED) from None

    async def _ask_scheduler(self, state: RequestState, exclude: set[str]) -> Placement:
        """Raises NoCapacity, Refused, SchedulerUnavailable."""
        client = self._client
        if not client.answering and client.standby.workers:
            raise SchedulerUnavailable("no scheduler answers")  # its return is not waited for here
        for others in reversed(range(client.schedulers)):
            state.epoch += 1  # also one that came to nothing is used up: it may have been booked
            try:
                return await client.place(
                    state.request_id,
                    state.epoch,
                    prompt_tokens=state.tokens_to_prefill,
                    max_new_tokens=state.tokens_to_generate,
                    prefix_hashes=state.prefix_hashes,
                    exclude=exclude,
                    vllm_version=VLLM_VERSION,
                    model_fingerprint=state.began_with,
                )
            except SchedulerUnavailable:
                self._unknown(state)
                if not others:
                    raise
            except asyncio.CancelledError:
                self._unknown(state)
                raise
        raise AssertionError("there is at least one scheduler")

    def _place_alone(self, state: RequestState, exclude: set[str]) -> Placement:
        """Raises NoCapacity, SchedulerUnavailable."""
        state.epoch += 1
        return self._client.place_alone(
            state.request_id,
            state.epoch,
            prompt_tokens=state.tokens_to_prefill,
            max_new_tokens=state.tokens_to_generate,
            prefix_hashes=state.prefix_hashes,
            exclude=exclude,
            vllm_version=VLLM_VERSION,
            model_fingerprint=state.began_with,
        )

    def _unknown(self, state: RequestState) -> None:
        """The scheduler may have booked what we never heard of."""
        self._client.reporter.finished(Attempt(state.request_id, state.epoch), "abort")


def _refused(no: NoCapacity) -> NotAdmitted:
    code = pb.Rejection.Code.Name(no.code).removeprefix("CODE_")
    return NotAdmitted(no.message, Why(code), no.retry_after_s)


def cost_of(state: RequestState) -> pb.Cost:
    """What the last attempt took so far."""
    timings = state.timings
    spent = timings.spent()
    return pb.Cost(
        queue_ms=spent.queue_ms,
        prefill_ms=spent.prefill_ms,
        handoff_ms=spent.handoff_ms,
        decode_ms=spent.decode_ms,
        handoff_bytes=timings.handoff_bytes,
        transport=timings.transport,
        prompt_tokens=state.prompt_tokens,
        output_tokens=len(state.tokens),
        drafted_tokens=spent.drafted_tokens,
        accepted_tokens=sum(spent.accepted_by_position),
        draft_steps=spent.draft_steps,
    )
