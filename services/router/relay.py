"""One request's life: placed, read by one worker, written by another, and carried on when one of them fails.

One asyncio task a request walks through the phases. Tokens do not wake it: the worker's stream calls the
leg, which passes them on to the front end at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from baton.protos import scheduler_pb2, worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.errors import (
    AttemptsExhausted,
    NotAdmitted,
    Overloaded,
    RequestFailed,
    TimedOut,
    Unsupported,
    WorkerUnreachable,
)
from baton.services.router.http.usage import log_request
from baton.services.router.journal import Journal
from baton.services.router.leg import Leg
from baton.services.router.metrics import RouterMetrics
from baton.services.router.placement import Placements
from baton.services.router.pool import WorkerPool
from baton.services.router.recovery import PROGRESS_TOKENS, Failure, Step, Trouble, backoff_s, next_step
from baton.services.router.state import RequestState
from baton.services.router.stream import WorkerStream
from baton.services.router.waiting import WaitingRoom

log = logging.getLogger(__name__)


class FrontEnd(Protocol):
    """Where tokens and errors go. Called from the event loop, never blocks."""

    def deliver(self, output: Any) -> None:
        """An output under the front end's own request id."""

    def finish(self, request_id: str, reason: str) -> None:
        """End a request without another token."""

    def fail(self, request_id: str, error: RequestFailed) -> None:
        """End a request with an error."""

    def first_output(self, output: Any, clock_offset_s: float) -> float:
        """Put a first output's times onto our clock; when its engine began with it, seconds, 0 if unknown."""

    def later_output(self, output: Any, clock_offset_s: float) -> None:
        """Take from another engine's output what the front end knows already."""


@dataclass(frozen=True)
class Parts:
    """What all relays of a router share."""

    placements: Placements
    pool: WorkerPool
    metrics: RouterMetrics
    max_attempts: int  # that workers began and lost in a row, until a request is given up
    waiting: WaitingRoom
    replace_wait_s: float = 60.0  # from a failure until somebody goes on
    journal: Journal = field(default_factory=Journal)


class Relay:
    """Carries one request from its first placement to its last token.

    `start()` begins; it ends by itself, or by `abort()` or `end()`. `on_over` is called once then.
    """

    def __init__(
        self, state: RequestState, parts: Parts, front_end: FrontEnd, on_over: Callable[[Relay], None]
    ) -> None:
        self.state = state
        self._front_end = front_end
        self._placements = parts.placements
        self._pool = parts.pool
        self._metrics = parts.metrics
        self._journal = parts.journal
        self._waiting = parts.waiting
        self._max_attempts = parts.max_attempts
        self._replace_wait_s = parts.replace_wait_s
        self._on_over = on_over
        self._placement: Placement | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_failure = ""
        self._held: Any = None  # the prefill worker's token, while its stream could not go on
        self._told = False  # the front end has had a token
        self._retries = 0  # placements that came to nothing, since one brought tokens
        self._give_up = 0.0  # time.monotonic, of these
        self._closed = False

    def start(self) -> None:
        """Enter the journal, and go on in a task. Raises NotAdmitted when the journal has no room."""
        self._journal.enter(self.state)
        self._task = asyncio.create_task(self._run(), name=f"relay {self.state.request_id}")

    def abort(self) -> None:
        """The client went away, or the front end has what it wants: both workers drop the request now."""
        if self.state.over:
            return
        self.state.outcome = "abort"
        self._abort_workers()
        self.close()  # here too: a task that is cancelled before its first step runs no `finally`
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        """The router ends before the request does: the client is told so."""
        if not self.state.over and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        state = self.state
        try:
            async with asyncio.timeout_at(self._loop_deadline()):
                await self._admit()
                await self._until_over()
        except TimeoutError:
            self._fail(self._timed_out())
        except NotAdmitted as error:
            self._metrics.rejected(error.why)
            self._fail(error, "refused")
        except RequestFailed as error:
            self._fail(error)
        except asyncio.CancelledError:
            if not state.over:  # not by abort()
                self._fail(AttemptsExhausted("the router is ending"))
            raise
        finally:
            if not state.over:
                self._fail(AttemptsExhausted("the router failed to carry this request on; see its log"))
            self.close()

    def close(self) -> None:
        """Let go of everything: the request has its outcome. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._journal.leave(self.state)
        if self._placement is not None:
            self._report(self.state.outcome)
        self._metrics.over(self.state)
        log_request(self.state)
        self._on_over(self)

    async def _until_over(self) -> None:
        state = self.state
        while True:
            had = len(state.tokens)
            failure = await self._attempt()
            if failure is None:
                return
            self._metrics.retried(failure.trouble.value, failure.worker_id)
            log.info("request %s, epoch %d: %s", state.request_id, state.epoch, failure.message)
            if self._finish_if_complete():
                return
            wrote = len(state.tokens) - had
            if wrote >= PROGRESS_TOKENS:
                state.failures = 0
            state.failures += failure.counts
            if wrote > 1 or not self._retries:  # one token is the reader's: nobody has gone on yet
                self._retries = 0
                self._give_up = time.monotonic() + self._replace_wait_s
            self._retries += 1
            self._last_failure = failure.message
            await self._recover(failure)

    # -- placements

    @property
    def placement(self) -> Placement:
        """The current one. Raises RuntimeError before the first."""
        if self._placement is None:
            raise RuntimeError(f"request {self.state.request_id} was not placed")
        return self._placement

    async def _admit(self) -> None:
        """Get the first placement, at once or when room comes. Raises NotAdmitted."""
        state = self.state
        state.waited_s = await self._waiting.admit(state.client, state.deadline, self._place)
        self._metrics.began()

    async def _place(self) -> None:
        placement = await self._placements.place(self.state, self._pool.suspects())
        if self._placement is not None:
            self._report("retried")
        self._placement = placement
        self.state.placed()

    async def _recover(self, failure: Failure) -> None:
        """Leave `self._placement` as one that can be tried. Raises RequestFailed when there is none."""
        state = self.state
        if failure.trouble is Trouble.INVALID:
            raise Unsupported(failure.message)
        step = next_step(
            failure,
            failures_left=self._max_attempts - state.failures,
            tokens_to_read=state.tokens_to_read,
        )
        if step is Step.GIVE_UP:
            raise AttemptsExhausted(
                f"{state.failures} workers of at most {self._max_attempts} failed under the request: "
                f"{failure.message}",
                retry_after_s=1.0,
            )
        if step is Step.PLACE_AGAIN:
            state.excluded.add(failure.worker_id)
            if not failure.decode_side_is_fine:
                await self._place_again()
                return
            self._stop_reading()
            try:
                await self._place()
            except NotAdmitted:
                pass  # nobody else reads it now: the decode worker can
            else:
                return
        self._compute_here()

    def _compute_here(self) -> None:
        """The placement stays, its decode worker does it all. It takes no epoch twice: it gets the next."""
        self._metrics.recomputed()
        self.state.epoch += 1
        self._stop_reading()
        self._placement = replace(self.placement, prefill=None)

    def _stop_reading(self) -> None:
        """Nobody wants what this placement's prefill worker has, or may still be doing."""
        if self.placement.prefill is not None:
            self._pool.abort(self.placement.prefill.worker_id, self.state.request_id)

    async def _place_again(self) -> None:
        """The next epoch. Waits for room, and for workers that come back.

        Raises AttemptsExhausted when that takes too long, or none of those that are there could ever take it.
        """
        state = self.state
        self._abort_workers()
        because = self._last_failure
        while time.monotonic() <= self._give_up:
            await asyncio.sleep(backoff_s(self._retries))
            try:
                return await self._place()
            except NotAdmitted as error:
                self._metrics.rejected(error.why)
                self._retries = max(self._retries, 1) + 1
                self._last_failure = f"{because}; and {error.message}"
                if error.never:
                    break
                if not error.waiting_helps:
                    # Nobody else is there. Who failed it may be well by now: a connection can break alone.
                    state.excluded.clear()
        raise AttemptsExhausted(f"nobody can take over: {self._last_failure}", retry_after_s=1.0)

    def _report(self, outcome: str) -> None:
        self._placements.finished(self.state, self.placement.attempt, outcome)

    # -- phases

    async def _attempt(self) -> Failure | None:
        """Run the placement. None when the request is over."""
        manifest = None
        placement = self.placement
        if placement.prefill is not None:
            if self._retries == 0:
                self._pool.warm(placement.decode)
            elif failure := await self._unreachable(placement.decode):
                return failure  # before somebody reads the whole text for nothing
            read = Leg(self, placement.prefill, worker_pb2.PHASE_PREFILL)
            failure = await read.run(None)
            if failure is not None or self.state.over or self._finish_if_complete():
                return failure
            self._placements.prefilled(placement.attempt)
            manifest = read.manifest
            if manifest is not None:
                self._metrics.saved(manifest)
        write = Leg(self, placement.decode, worker_pb2.PHASE_DECODE)
        with self._pool.watch_pull(self.reader_id, self.state.request_id, write.on_source_lost):
            return await write.run(manifest)

    async def _unreachable(self, worker: scheduler_pb2.Worker) -> Failure | None:
        try:
            await self._pool.stream(worker)
        except WorkerUnreachable as error:
            return Failure(Trouble.UNREACHABLE, worker.worker_id, str(error))
        return None

    def _finish_if_complete(self) -> bool:
        """An engine must not be asked for more than there may be: what is complete ends here."""
        if not self.state.complete:
            return False
        self.state.outcome = "length"
        self._abort_workers()
        self.close()
        self._deliver_held()
        self._front_end.finish(self.state.frontend_id, "length")
        return True

    def _fail(self, error: RequestFailed, outcome: str = "error") -> None:
        if self.state.over:
            return
        self.state.outcome = outcome
        self._abort_workers()
        self._front_end.fail(self.state.frontend_id, error)

    def _abort_workers(self) -> None:
        if self._placement is None:
            return
        for worker in (self._placement.prefill, self._placement.decode):
            if worker is not None:
                self._pool.abort(worker.worker_id, self.state.request_id)

    def _timed_out(self) -> TimedOut:
        because = f"; {self._last_failure}" if self._last_failure else ""
        if self._placement is None:
            because = "; it was waiting for room on the workers"
        allowed_s = self.state.deadline - self.state.arrived
        return TimedOut(f"the request took longer than {allowed_s:.3g} s{because}")

    def _loop_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.state.deadline - time.monotonic()

    # -- what legs use

    async def stream(self, worker: scheduler_pb2.Worker) -> WorkerStream:
        """Raises WorkerUnreachable."""
        return await self._pool.stream(worker)

    @property
    def waits_for_slot(self) -> bool:
        """The decode worker cannot go on at once: after the first token the stream would stand still."""
        return self.placement.waits

    def deliver(self, output: Any) -> None:
        self._deliver_held()
        self._to_front_end(output)

    def hold(self, output: Any) -> None:
        """Keep the prefill worker's token until the decode worker goes on, or the request ends well."""
        self._deliver_held()
        self._held = output

    def _deliver_held(self) -> None:
        output, self._held = self._held, None
        if output is not None:
            self._to_front_end(output)

    def _to_front_end(self, output: Any) -> None:
        if not self._told and output.new_token_ids:
            self._told = True
            self._metrics.first_token(self.state, self.reader_id)
        output.request_id = self.state.frontend_id
        self._front_end.deliver(output)

    @property
    def reader_id(self) -> str:
        """Who read the prompt in this placement."""
        return (self.placement.prefill or self.placement.decode).worker_id

    def adapt(self, output: Any, clock_offset_s: float) -> None:
        """What a leg's first output, and any with events, needs before it is delivered."""
        state = self.state
        if state.tokens:
            self._front_end.later_output(output, clock_offset_s)
        else:
            state.timings.prefill_began = self._front_end.first_output(output, clock_offset_s)

    def grow(self) -> bool:
        """Get the answer more room in the journal. False: there is none, and the request has ended."""
        try:
            self._journal.grow(self.state)
        except Overloaded as error:
            self._fail(error)
            if self._task is not None:
                self._task.cancel()
        return not self.state.over

    def stop_pulling(self) -> None:
        """The decode worker waits for what nobody will send."""
        self._pool.abort(self.placement.decode.worker_id, self.state.request_id)

    def release_saved(self) -> None:
        """The answer ended with the token that the prompt's reader wrote: its KV is wanted by nobody."""
        self._pool.abort(self.reader_id, self.state.request_id)

    def shared(self, blocks: int) -> None:
        """So many KV blocks of the decode worker are other requests' as well."""
        self._placements.shared(self.placement.attempt, blocks)

    def admitted(self, admitted: worker_pb2.Admitted) -> None:
        self._metrics.admitted(admitted, self.state, self.placement.decode.worker_id)
