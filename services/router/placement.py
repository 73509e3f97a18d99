"""Get placements from a scheduler, or from the last snapshot while none answers, and report their ends."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from baton.attempts import Attempt, image_id
from baton.prefix_keys import PromptKeys, image_key
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import Placement, SchedulerClient
from baton.scheduler.errors import NoCapacity, Refused, SchedulerUnavailable
from baton.scheduler.need import Need
from baton.services.classes import STANDARD, ServiceClass
from baton.services.engine.args import VLLM_VERSION
from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics
from baton.services.router.recovery import SHORT_PROMPT_TOKENS
from baton.services.router.state import RequestState

CUT_S = 5.0  # time between two attempts with a pair of workers that could not reach each other
MOST_PAIRS = 1024  # beyond it the oldest pair is forgotten

Pair = tuple[str, str]  # ids of the worker that saves KV and of the worker that pulls it


class Pairs:
    """The pairs of workers whose last handoff failed although this router reaches both. Not thread-safe.

    Requests avoid such a pair: they would be prefilled for nothing. One request per `CUT_S` tries it again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cut: OrderedDict[Pair, float] = OrderedDict()  # the time until which the pair is avoided

    def failed(self, pair: Pair) -> None:
        """Record that the second worker could not pull KV from the first."""
        self._cut[pair] = self._clock() + CUT_S
        self._cut.move_to_end(pair)
        if len(self._cut) > MOST_PAIRS:
            self._cut.popitem(last=False)

    def passed(self, pair: Pair) -> None:
        self._cut.pop(pair, None)

    def avoid(self, pair: Pair) -> bool:
        """Return whether to avoid a handoff between the two. After `CUT_S`, one caller may try."""
        until = self._cut.get(pair)
        if until is None:
            return False
        if self._clock() < until:
            return True
        self._cut[pair] = self._clock() + CUT_S  # meanwhile other requests avoid the pair
        return False


class Placements:
    """Places requests, and reports the end of each epoch to the scheduler."""

    def __init__(
        self,
        client: SchedulerClient,
        metrics: RouterMetrics,
        model: str = "",
        chosen: Callable[[str], None] = lambda _: None,
        pairs_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """model: named in refusals; chosen: called with the id of each worker of a placement."""
        self.pairs = Pairs(pairs_clock)
        self._chosen = chosen
        self._whose = f"model {model!r}: " if model else ""
        self._client = client
        self.reports = client.reports  # tells the scheduler which bookings have ended
        self._metrics = metrics

    async def place(
        self, state: RequestState, suspects: set[str], service: ServiceClass = STANDARD
    ) -> Placement:
        """Get a placement for the request's next epoch, in the class `service`.

        Avoids `suspects` if it can (a stream may break while its worker is healthy), and pairs of workers
        that recently could not reach each other. Raises NotAdmitted; in that case, and if
        cancelled, nothing stays booked.
        """
        placement = await self._place(state, suspects, service)
        if placement.prefill is None or not self._apart(placement):
            return placement
        self._metrics.pairs_avoided.inc()
        if state.tokens_to_prefill > SHORT_PROMPT_TOKENS:
            try:
                others = suspects | {placement.prefill.worker_id}
                another = await self._place(state, others, service)
            except NotAdmitted:
                placement = self.hold_on(state, placement)
            except asyncio.CancelledError:
                self.reports.finished(placement.attempt, "abort")
                raise
            else:
                self.reports.finished(placement.attempt, "retried")
                placement = another
                if not self._apart(placement):
                    return placement
        return self.without_prefill(placement)

    def _apart(self, placement: Placement) -> bool:
        prefill, decode = placement.prefill, placement.decode
        return prefill is not None and self.pairs.avoid((prefill.worker_id, decode.worker_id))

    async def _place(self, state: RequestState, suspects: set[str], service: ServiceClass) -> Placement:
        began = time.monotonic()
        try:
            placement = await self._placement(state, state.excluded | suspects, service)
        except NoCapacity as no:
            if not suspects - state.excluded:
                raise self._refused(no) from None
            try:
                placement = await self._placement(state, state.excluded, service)
            except NoCapacity as still_no:
                raise self._refused(still_no) from None
        state.model_fingerprint = placement.decode.model_fingerprint
        self._metrics.placed(placement, time.monotonic() - began)
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                self._chosen(worker.worker_id)
        return placement

    @property
    def encoders(self) -> bool:
        """Whether there are encode workers, as far as known."""
        return self._client.standby.fleet.encoders

    async def encode(
        self, state: RequestState, number: int, prompt: Placement, exclude: frozenset[str]
    ) -> Placement | None:
        """Book an encode worker for the request's image `number`; return None if none can be booked.

        prompt: the placement of the prompt, whose worker will pull the embeddings
        """
        image, worker = state.images[number], prompt.prefill or prompt.decode
        need = Need(
            attempt=Attempt(image_id(state.request_id, number), state.epoch),
            router_id=self._client.router_id,
            prompt_tokens=image.tokens,
            max_new_tokens=0,
            prefix=PromptKeys((image_key(image.identifier),), image.tokens),
            exclude=exclude,
            vllm_version=VLLM_VERSION,
            model_fingerprint=worker.model_fingerprint,
            priority=state.service.priority,
            room=state.service.room,
            encode=True,
        )
        try:
            if prompt.from_snapshot:
                placed = self._client.place_from_snapshot(need)
            else:
                placed = await self._client.place(need)
        except NoCapacity:
            return None
        except (SchedulerUnavailable, Refused):
            self.reports.finished(need.attempt, "abort")  # the encode may be booked although no reply came
            return None
        except asyncio.CancelledError:
            self.reports.finished(need.attempt, "abort")
            raise
        encoder = placed.decode
        # A scheduler of an earlier version does not know encodes.
        if encoder.role != pb.ROLE_ENCODE or self.pairs.avoid((encoder.worker_id, worker.worker_id)):
            self.reports.finished(need.attempt, "abort")
            return None
        return placed

    def avoidable(self, full: Collection[str], others: Collection[str]) -> set[str]:
        """Return the `full` workers that another worker of their role, or a mixed one, can replace.

        Workers in `others` cannot replace them. A worker without a replacement is asked again: if it were
        excluded, the policy would give its work to workers of the other role (policy/choose.py).
        """
        if not full:
            return set()
        known = [one for one in self._client.standby.workers if one.state == pb.WORKER_STATE_READY]
        roles = {one.identity.worker_id: one.identity.role for one in known}
        left = {role for worker, role in roles.items() if worker not in full and worker not in others}
        others_can = {worker for worker in full if roles.get(worker) in left or worker not in roles}
        return set(full) if pb.ROLE_MIXED in left else others_can

    def hold_on(self, state: RequestState, placement: Placement) -> Placement:
        """Book a placement again, after asking for another one in vain: asking may have ended its booking."""
        state.epoch += 1
        return replace(placement, attempt=self.reports.hold_on(placement.attempt, state.epoch))

    def without_prefill(self, placement: Placement) -> Placement:
        """Free the prefill worker's booking: the decode worker prefills the prompt too."""
        self.reports.prefilled(placement.attempt)
        return replace(placement, prefill=None, prompt_tokens=0)

    def finished(self, state: RequestState, attempt: Attempt, outcome: str) -> None:
        """Report the attempt's end, which ends its bookings, and its cost."""
        self.reports.finished(attempt, outcome, cost_of(state))

    async def _placement(self, state: RequestState, exclude: set[str], service: ServiceClass) -> Placement:
        """Get a placement from a scheduler, or from the last snapshot.

        The snapshot is used while no scheduler answers, and also if the scheduler has just started or lost
        workers that this router still reaches. Raises NoCapacity and NotAdmitted.
        """
        problem: NoCapacity | NotAdmitted
        try:
            return await self._place_by_scheduler(state, exclude, service)
        except NoCapacity as no:
            lost = no.code == pb.Rejection.CODE_NO_WORKERS and self._client.standby.keeps_lost
            if not (no.settling or lost) or no.code == pb.Rejection.CODE_STALE_EPOCH:
                raise
            problem = no
        except SchedulerUnavailable as error:
            problem = NotAdmitted(f"{self._whose}{error.message}", Why.UNAVAILABLE, error.retry_after_s)
        except Refused as error:
            why = f"{self._whose}the scheduler refuses the request: {error}"
            raise NotAdmitted(why, Why.REFUSED) from None
        state.epoch += 1
        try:
            return self._client.place_from_snapshot(need_of(state, self._client.router_id, exclude, service))
        except SchedulerUnavailable:
            raise problem from None

    async def _place_by_scheduler(
        self, state: RequestState, exclude: set[str], service: ServiceClass
    ) -> Placement:
        client = self._client
        for others in reversed(range(client.schedulers)):
            if not client.answering and client.standby.workers:
                raise SchedulerUnavailable("no scheduler answers")  # place from the snapshot without waiting
            state.epoch += 1  # each epoch is used once: it may be booked even if no reply came
            try:
                return await client.place(need_of(state, client.router_id, exclude, service))
            except SchedulerUnavailable:
                self._unknown(state)
                if not others:
                    raise
            except asyncio.CancelledError:
                self._unknown(state)
                raise
        raise AssertionError("there is at least one scheduler")

    def _unknown(self, state: RequestState) -> None:
        """Release the epoch: the scheduler may have booked it although no reply came."""
        self.reports.finished(Attempt(state.request_id, state.epoch), "abort")

    def _refused(self, error: NoCapacity) -> NotAdmitted:
        code = pb.Rejection.Code.Name(error.code).removeprefix("CODE_")
        return NotAdmitted(f"{self._whose}{error.message}", Why(code), error.retry_after_s)


def need_of(
    state: RequestState, router_id: str, exclude: Iterable[str] = (), service: ServiceClass = STANDARD
) -> Need:
    """Return the needs of the request's current epoch in the class `service`."""
    return Need(
        attempt=Attempt(state.request_id, state.epoch),
        router_id=router_id,
        prompt_tokens=state.tokens_to_prefill,
        max_new_tokens=state.tokens_to_generate,
        prefix=state.prefix,
        exclude=frozenset(exclude),
        vllm_version=VLLM_VERSION,
        model_fingerprint=state.began_with,
        waited_s=time.monotonic() - state.arrived,
        adapter=state.adapter,
        priority=service.priority,
        room=service.room,
    )


def cost_of(state: RequestState) -> pb.Cost:
    handoff, spent = state.timings.handoff, state.timings.spent()
    return pb.Cost(
        queue_ms=spent.queue_ms,
        prefill_ms=spent.prefill_ms,
        handoff_ms=spent.handoff_ms,
        decode_ms=spent.decode_ms,
        handoff_bytes=handoff.bytes if handoff is not None else 0,
        transport=handoff.transport if handoff is not None else "",
        prompt_tokens=state.prompt_tokens,
        output_tokens=len(state.tokens),
        drafted_tokens=spent.drafted_tokens,
        accepted_tokens=sum(spent.accepted_by_position),
        draft_steps=spent.draft_steps,
    )
