"""A simulated router, with Baton's own waiting room.

    Baton's router                  here
    WaitingRoom                     the same
    Placements and Exchange         calls of the placer; reports reach the scheduler in batches, as in Baton
    Leg, over a worker's stream     a job in a simulated engine

Nothing fails here, except that a request may be refused, time out or be too large.
"""

from __future__ import annotations

import asyncio
from itertools import count

from prometheus_client import CollectorRegistry

from baton.attempts import Attempt
from baton.prefix_keys import PromptKeys, prompt_keys
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment
from baton.scheduler.exchange import FLUSH_S, RENEWALS_PER_LEASE
from baton.scheduler.need import Need
from baton.scheduler.policy import NoChoice
from baton.scheduler.types import RouterReport
from baton.services.classes import ServiceClass
from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics
from baton.services.router.state import NOBODY
from baton.services.router.waiting import WaitingRoom
from baton.services.simulate.deployment import Setup, SimulatedDeployment
from baton.services.simulate.engine import Job, TooLarge
from baton.services.simulate.figures import Outcome
from baton.services.simulate.traces import Ask
from baton.services.simulate.worker import SimulatedWorker


class SimulatedRouter:
    """One router. Call `serve` for each request, in a task of its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        deployment: SimulatedDeployment,
        setup: Setup,
        block_tokens: int,
    ) -> None:
        self._loop = loop
        self._name = name
        self._deployment = deployment
        self._profile = setup.profile
        self._request_s = setup.router.request_timeout_s
        self._block_tokens = block_tokens
        metrics = RouterMetrics(CollectorRegistry())
        self._waiting = WaitingRoom(
            setup.router.max_waiting, setup.router.max_wait_s, metrics, clock=loop.time
        )
        self._held: dict[str, Attempt] = {}  # placed attempts by request
        self._prefilled: list[Attempt] = []  # not reported yet
        self._finished: list[tuple[Attempt, pb.Finished]] = []
        self._renew_s = setup.scheduler.placement_lease_s / RENEWALS_PER_LEASE
        loop.call_later(self._renew_s, self._renew)

    async def serve(self, name: str, ask: Ask, outcome: Outcome) -> None:
        """Run a request and record it in `outcome`."""
        prefix = prompt_keys(ask.hashes[: ask.prompt // self._block_tokens], self._block_tokens)
        epochs, placed = count(1), list[Assignment]()

        async def place(service: ServiceClass) -> None:
            placed.append(self._place(Attempt(name, next(epochs)), ask, outcome, service, prefix))

        try:
            async with asyncio.timeout(self._request_s):
                deadline = outcome.arrived + self._request_s
                outcome.waited_s = await self._waiting.admit(NOBODY, deadline, place, ask.service)
                try:
                    await self._run(self._held[name], ask, outcome, placed[0])
                finally:
                    self._waiting.left(ask.service)
            outcome.ended = self._loop.time() + self._profile.pace.overhead_s
        except NotAdmitted as no:
            outcome.problem = no.why
        except TooLarge:
            outcome.problem = "the request outgrew the KV cache"
        except TimeoutError:
            outcome.problem = "router.request_timeout_s"
        finally:
            if held := self._held.pop(name, None):
                ended = pb.Finished(outcome="error" if outcome.problem else "length")
                self._finished.append((held, ended))
                self._report_soon()

    def _place(
        self, attempt: Attempt, ask: Ask, outcome: Outcome, service: ServiceClass, prefix: PromptKeys
    ) -> Assignment:
        """Place a request. Raises NotAdmitted."""
        need = Need(
            attempt,
            self._name,
            ask.prompt,
            ask.output,
            prefix=prefix,
            waited_s=self._loop.time() - outcome.arrived,
            priority=service.priority,
            room=service.room,
        )
        found = self._deployment.placer.place(need)
        if isinstance(found, NoChoice):
            code = pb.Rejection.Code.Name(found.code).removeprefix("CODE_")
            raise NotAdmitted(found.message, Why(code))
        self._held[attempt.request_id] = attempt
        outcome.known = found.held or 0
        return found

    async def _run(self, attempt: Attempt, ask: Ask, outcome: Outcome, placed: Assignment) -> None:
        """Run a placed request. Raises TooLarge."""
        overhead_s, left = self._profile.pace.overhead_s, ask.output
        decode = self._deployment.workers[placed.decode.worker_id]
        if placed.prefill is not None:
            source = self._deployment.workers[placed.prefill.worker_id]
            job = await self._in_engine(ask, outcome, source, 1, given=False)
            left -= 1
            if not placed.waits or not left:
                outcome.first = job.first_at + overhead_s
            self._prefilled.append(attempt)
            self._report_soon()
            if not left:
                return
            await self._hand_over(ask, source, decode, job)
        given = placed.prefill is not None
        job = await self._in_engine(ask, outcome, decode, left, given=given)
        came = job.next_at if given else job.first_at
        if not outcome.first:
            outcome.first = came + overhead_s
        elif given:
            self._deployment.gaps.add(came - (outcome.first - overhead_s))

    async def _in_engine(
        self, ask: Ask, outcome: Outcome, worker: SimulatedWorker, output: int, *, given: bool
    ) -> Job:
        over, patience_ms = self._loop.create_future(), round(1e3 * ask.service.patience_s)
        job = Job(ask.hashes, ask.prompt, output, given, over, patience_ms=patience_ms)
        worker.engine.submit(job)
        try:
            await job.over
        except asyncio.CancelledError:  # the request timed out
            worker.engine.abort(job)
            raise
        finally:
            if not given:
                outcome.computed += job.computed - job.hit
                outcome.hit = job.hit
        return job

    async def _hand_over(self, ask: Ask, source: SimulatedWorker, target: SimulatedWorker, job: Job) -> None:
        """Move the part of the prompt's KV that the decode worker has not cached."""
        way, now = self._profile.handoff, self._loop.time()
        cached = target.engine.cache.hit(ask.hashes[: job.prompt // self._block_tokens])
        held = min(self._block_tokens * cached, job.prompt)
        size = (job.prompt - held) * way.token_bytes
        began = job.first_piece_at if way.early else now
        arrived = max(began, target.link_free_at) + size / way.bytes_per_s
        last = min(size, job.last_piece * way.token_bytes)
        ready = max(arrived, now + last / way.bytes_per_s) + way.latency_s
        target.link_free_at = max(target.link_free_at, min(arrived, ready))
        source.pin(size)
        try:
            await asyncio.sleep(ready - now)
        finally:
            source.unpin(size)

    # Reports.

    def _report_soon(self) -> None:
        if len(self._prefilled) + len(self._finished) == 1:
            self._loop.call_later(FLUSH_S, self._report)

    def _report(self) -> None:
        report = RouterReport(prefilled=tuple(self._prefilled), finished=tuple(self._finished))
        self._prefilled, self._finished = [], []
        self._deployment.ledger.report(report)
        self._waiting.freed()

    def _renew(self) -> None:
        if self._held:
            self._deployment.ledger.report(RouterReport(renewed=tuple(self._held.values())))
        self._loop.call_later(self._renew_s, self._renew)
