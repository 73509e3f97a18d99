"""A simulated router, with Baton's own waiting room and recovery.

    Baton's router                       here
    WaitingRoom, next_step, backoff_s    the same
    Placements and Reporter              calls of the placer; reports reach it in batches, as in Baton
    Leg, over a worker's stream          a job in a simulated engine

The simulated scheduler never fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry

from baton.attempts import Attempt
from baton.prefix_keys import PromptKeys, prompt_keys
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment
from baton.scheduler.need import Need
from baton.scheduler.policy import NoChoice
from baton.scheduler.reporter import FLUSH_S, RENEWALS_PER_LEASE
from baton.scheduler.types import RouterReport
from baton.services.classes import ServiceClass
from baton.services.config import RouterSettings, SchedulerSettings
from baton.services.router.errors import AttemptsExhausted, NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics
from baton.services.router.recovery import (
    MAX_ATTEMPTS,
    PROGRESS_TOKENS,
    Failure,
    RecoveryStep,
    Toll,
    Trouble,
    backoff_s,
    next_step,
)
from baton.services.router.relay import EXCLUDED_S
from baton.services.router.state import NOBODY
from baton.services.router.waiting import Place, WaitingRoom
from baton.services.simulate.deployment import SimulatedDeployment
from baton.services.simulate.engine import EngineLost, Job, TooLarge
from baton.services.simulate.figures import Outcome
from baton.services.simulate.profile import Profile
from baton.services.simulate.traces import Ask
from baton.services.simulate.worker import SimulatedWorker


@dataclass(frozen=True)
class Wire:
    """Delays of messages, in seconds."""

    message_s: float = 0.0  # between a router and a worker, one way
    place_s: float = 0.0  # a placement by the scheduler, both ways


@dataclass(slots=True)
class _Life:
    """One request with all its attempts."""

    name: str
    ask: Ask
    outcome: Outcome
    prefix: PromptKeys
    epoch: int = 0
    generated: int = 0
    failures: Toll = field(default_factory=Toll)
    retries: int = 0
    give_up: float = 0.0
    excluded: set[str] = field(default_factory=set)
    assignment: Assignment | None = None

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.name, self.epoch)

    @property
    def tokens_to_prefill(self) -> int:
        """The tokens to prefill on an engine that has none of its KV."""
        return self.ask.prompt + self.generated

    @property
    def left(self) -> int:
        return self.ask.output - self.generated


class SimulatedRouter:
    """One router. Call `serve` for each request, in a task of its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        deployment: SimulatedDeployment,
        *,
        profile: Profile,
        scheduler: SchedulerSettings,
        router: RouterSettings,
        block_tokens: int,
        seed: int,
        wire: Wire,
    ) -> None:
        self._loop = loop
        self._name = name
        self._deployment = deployment
        self._profile = profile
        self._settings = router
        self._block_tokens = block_tokens
        self._draw = random.Random(seed)  # noqa: S311 (no secret)
        metrics = RouterMetrics(CollectorRegistry())
        self._waiting = WaitingRoom(router.max_waiting, router.max_wait_s, metrics, clock=loop.time)
        self._wire = wire
        self._held: dict[str, Attempt] = {}  # placed attempts by request
        self._prefilled: list[Attempt] = []  # not reported yet
        self._finished: list[tuple[Attempt, pb.Finished]] = []
        self._renew_s = scheduler.placement_lease_s / RENEWALS_PER_LEASE
        loop.call_later(self._renew_s, self._renew)

    async def serve(self, name: str, ask: Ask, outcome: Outcome) -> None:
        """Run a request and record it in `outcome`."""
        prefix = prompt_keys(ask.hashes[: ask.prompt // self._block_tokens], self._block_tokens)
        life = _Life(name, ask, outcome, prefix)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                deadline = outcome.arrived + self._settings.request_timeout_s
                place, service = self._placing(life), ask.service
                outcome.waited_s = await self._waiting.admit(NOBODY, deadline, place, service)
                await self._run_through(life)
            outcome.ended = self._loop.time() + self._profile.pace.overhead_s
        except NotAdmitted as no:
            outcome.problem = no.why
        except AttemptsExhausted as error:
            outcome.problem = error.message
        except TimeoutError:
            outcome.problem = "router.request_timeout_s"
        finally:
            self._end(life, "error" if outcome.problem else "length")

    async def _run_through(self, life: _Life) -> None:
        """Run an admitted request, with as many attempts as it takes."""
        try:
            while (failure := await self._attempt(life)) is not None:
                await self._recover(life, failure)
        finally:
            self._waiting.left(life.ask.service)

    def _placing(self, life: _Life) -> Place:
        return lambda service: self._place(life, service)

    async def _place(self, life: _Life, service: ServiceClass) -> None:
        """Place the next attempt. Raises NotAdmitted."""
        life.epoch += 1
        need = Need(
            Attempt(life.name, life.epoch),
            self._name,
            life.tokens_to_prefill,
            life.left,
            prefix=life.prefix,
            exclude=frozenset(life.excluded),
            waited_s=self._loop.time() - life.outcome.arrived,
            priority=service.priority,
            room=service.room,
        )
        await _pause(self._wire.place_s / 2)
        found = self._deployment.placer.place(need)
        if isinstance(found, Assignment):
            self._held[life.name] = need.attempt
        start_s = self._wire.message_s if isinstance(found, Assignment) else 0.0
        await _pause(self._wire.place_s / 2 + start_s)
        if isinstance(found, NoChoice):
            code = pb.Rejection.Code.Name(found.code).removeprefix("CODE_")
            raise NotAdmitted(found.message, Why(code))
        life.assignment = found
        life.outcome.tries += 1
        if life.outcome.tries == 1:
            life.outcome.known = found.held or 0

    async def _recover(self, life: _Life, failure: Failure) -> None:
        """Prepare the next attempt. Raises AttemptsExhausted."""
        if failure.counts:
            life.failures.add(failure.worker_id)
        life.retries += 1
        step = next_step(
            failure,
            failures_left=MAX_ATTEMPTS - len(life.failures),
            tokens_to_prefill=life.tokens_to_prefill,
        )
        if step is RecoveryStep.GIVE_UP:
            raise AttemptsExhausted(failure.message)
        if step is RecoveryStep.PLACE_AGAIN:
            life.excluded.add(failure.worker_id)
            if not failure.decode_side_is_fine:
                await self._place_again(life, failure)
                return
            with contextlib.suppress(NotAdmitted):  # otherwise the decode worker prefills it
                await self._place(life, life.ask.service)
                return
        if life.assignment is not None:
            life.assignment = replace(life.assignment, prefill=None)

    async def _place_again(self, life: _Life, failure: Failure) -> None:
        """Place again, and wait for room or for workers to return. Raises AttemptsExhausted."""
        self._end(life, "retried")
        while self._loop.time() <= life.give_up:
            await asyncio.sleep(backoff_s(life.retries, self._draw.uniform))
            wait_s = min(EXCLUDED_S, life.give_up - self._loop.time())
            try:
                await self._waiting.resume(wait_s, self._placing(life))
            except NotAdmitted as no:
                life.retries += 1
                if no.never:
                    break
                life.excluded.clear()
            else:
                return
        raise AttemptsExhausted(f"no worker can take over: {failure.message}")

    async def _attempt(self, life: _Life) -> Failure | None:
        """Run one attempt. Return None if the request is done."""
        before, assignment = life.generated, life.assignment
        if assignment is None:
            raise RuntimeError(f"{life.name} was not placed")
        failure = await self._run(life, assignment)
        if failure is None:
            return None
        generated = life.generated - before
        if generated >= PROGRESS_TOKENS or not life.retries:
            life.failures.clear()
            life.retries = 0
            life.give_up = self._loop.time() + self._settings.replace_wait_s
        return failure

    async def _run(self, life: _Life, assignment: Assignment) -> Failure | None:
        source = None
        if assignment.prefill is not None:
            source = self._deployment.workers.get(assignment.prefill.worker_id)
            if source is None:
                return _unreachable(assignment.prefill.worker_id)
            job = self._job(life, life.tokens_to_prefill, 1, given=False)
            if failure := await self._in_engine(life, source, job):
                return failure
            if not life.outcome.first and (not assignment.waits or not life.left):
                life.outcome.first = job.first_at + self._profile.pace.overhead_s
            self._prefilled.append(life.attempt)
            self._report_soon()
            if not life.left:
                return None
            if failure := await self._hand_over(life, assignment, source, job):
                return failure
        worker = self._deployment.workers.get(assignment.decode.worker_id)
        if worker is None:
            return _unreachable(assignment.decode.worker_id)
        # The handed-over KV does not include the last token's.
        given = source is not None
        job = self._job(life, life.tokens_to_prefill - given, life.left, given=given)
        ended = await self._in_engine(life, worker, job)
        self._see(life, job)
        return ended

    def _job(self, life: _Life, prompt: int, output: int, *, given: bool) -> Job:
        patience_ms = round(1e3 * life.ask.service.patience_s)
        over = self._loop.create_future()
        return Job(life.ask.hashes, prompt, output, given, over, patience_ms=patience_ms)

    async def _in_engine(self, life: _Life, worker: SimulatedWorker, job: Job) -> Failure | None:
        """Run a job and return how it failed."""
        asked = job.output
        worker.engine.submit(job)
        try:
            await job.over
        except asyncio.CancelledError:  # the request timed out
            worker.engine.abort(job)
            raise
        except EngineLost:
            life.generated += min(int(job.generated), asked)
            return Failure(Trouble.LOST, worker.worker_id, f"worker {worker.worker_id} died")
        except TooLarge:
            return Failure(Trouble.INVALID, worker.worker_id, "the request outgrew the KV cache")
        finally:
            if not job.given:
                life.outcome.computed += job.computed - job.hit
                if life.outcome.tries == 1:
                    life.outcome.hit = job.hit
        life.generated += asked
        return None

    def _see(self, life: _Life, job: Job) -> None:
        """Record when the client saw a job's first token."""
        came = job.next_at if job.given else job.first_at
        if not came:
            return
        if not life.outcome.first:
            life.outcome.first = came + self._profile.pace.overhead_s
        elif job.given and life.outcome.tries == 1:
            self._deployment.gaps.add(came - (life.outcome.first - self._profile.pace.overhead_s))

    async def _hand_over(
        self, life: _Life, assignment: Assignment, source: SimulatedWorker, job: Job
    ) -> Failure | None:
        """Move the part of the prompt's KV that the decode worker has not cached."""
        way, now = self._profile.handoff, self._loop.time()
        target = self._deployment.workers.get(assignment.decode.worker_id)
        if target is None:
            return _unreachable(assignment.decode.worker_id)
        held = self._block_tokens * target.engine.cache.hit(
            life.ask.hashes[: job.prompt // self._block_tokens]
        )
        size = (job.prompt - min(held, job.prompt)) * way.token_bytes
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
        if not source.alive:
            return Failure(Trouble.HANDOFF, source.worker_id, f"worker {source.worker_id} died with its KV")
        return None

    # Reports.

    def _end(self, life: _Life, outcome: str) -> None:
        """Report the end of an attempt, if it was placed."""
        if held := self._held.pop(life.name, None):
            self._finished.append((held, pb.Finished(outcome=outcome)))
            self._report_soon()

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


def _unreachable(worker_id: str) -> Failure:
    return Failure(Trouble.UNREACHABLE, worker_id, f"worker {worker_id} is gone")


async def _pause(seconds: float) -> None:
    """Sleep, but do not yield for 0 seconds."""
    if seconds > 0:
        await asyncio.sleep(seconds)
