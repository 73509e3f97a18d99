"""Run a request: wait for room, place it, run its legs, and resume it elsewhere if a worker fails.

One asyncio task per request goes from placement to placement. Tokens do not wake it: the worker's stream
calls the leg, and the leg calls the front end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus

from baton.scheduler.client import Placement
from baton.services import logs
from baton.services.classes import ServiceClass
from baton.services.router.errors import (
    Convicted,
    EngineBroken,
    NotAdmitted,
    Overloaded,
    RequestFailed,
    Unsupported,
    Why,
)
from baton.services.router.legs import DecodeLeg, run_placement
from baton.services.router.recovery import (
    PROGRESS_TOKENS,
    Failure,
    RecoveryStep,
    Trouble,
    backoff_s,
    next_step,
)
from baton.services.router.relay_parts import RelayParts
from baton.services.router.sink import FrontEnd, OutputSink
from baton.services.router.state import RequestState

# For this many seconds, a request that resumes looks for room only on workers that have not failed it.
EXCLUDED_S = 3.0
IMAGES_AGAIN = 2  # how many times images are sent again to a worker that lacks them, without progress

log = logging.getLogger(__name__)


class Relay:
    """Run one request from `start()` until it has its outcome, then call `on_over` once.

    `abort()` and `end()` end it early.
    """

    def __init__(
        self, state: RequestState, parts: RelayParts, front_end: FrontEnd, on_over: Callable[[Relay], None]
    ) -> None:
        self.state = state
        self.parts = parts
        self.sink = OutputSink(state, front_end, self._first_token)
        self._on_over = on_over
        self._placement: Placement | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_failure = ""
        self._retries = 0  # placements in a row without progress
        self._give_up = 0.0  # time.monotonic: when to stop retrying
        self._lacking: Counter[str] = Counter()  # workers that lacked images, since the last progress
        self._full: set[str] = set()  # workers that refused it as full, since the last progress
        self._closed = False
        self._admitted = False

    def start(self) -> None:
        """Enter the request in the journal, and start its task. Raises NotAdmitted or Convicted."""
        try:
            self.parts.convicts.check(self.state.engine_request)
        except Convicted:
            self.parts.metrics.suspects.labels("refused").inc()
            raise
        self.parts.journal.enter(self.state)
        self.parts.counts.arrived(self.state)
        self._task = asyncio.create_task(self._run(), name=f"relay {self.state.request_id}")

    def abort(self) -> None:
        """Abort the request at its workers: the client has disconnected or needs no more tokens."""
        if self.state.over:
            return
        self.state.outcome = "abort"
        self._abort_workers()
        # Not left to the task: if it is cancelled before its first step, its `finally` does not run.
        self.close()
        self.sink.close()
        task, self._task = self._task, None  # the frames of its exception refer to the relay
        if task is not None:
            task.cancel()

    def end(self) -> None:
        """End the request with an error because the router is shutting down."""
        if not self.state.over and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        state = self.state
        logs.concern(request_id=state.request_id)
        try:
            async with asyncio.timeout(state.deadline - time.monotonic()):
                state.waited_s = await self.parts.waiting.admit(
                    state.party, state.deadline, self._place, state.service
                )
                self._admitted = True
                await self._until_over()
        except TimeoutError:
            self._fail(self._timed_out())
        except NotAdmitted as error:
            self.parts.metrics.rejections.labels(error.why).inc()
            self._fail(error, "refused")
        except RequestFailed as error:
            self._fail(error)
        except asyncio.CancelledError:
            if not state.over:  # ended by end(), not by abort()
                self._fail(RequestFailed("the router is shutting down"))
            raise
        finally:
            if not state.over:
                self._fail(RequestFailed("the router failed to resume this request; see its log"))
            self.close()
            self.sink.close()

    async def _until_over(self) -> None:
        state = self.state
        while True:
            before, alone = len(state.tokens), state.suspicion.suspect
            failure = await (self._attempt_alone() if alone else run_placement(self))
            if state.over:
                return
            if failure is None:
                if self._finish_if_complete():
                    return
                continue
            state.failed(failure)
            self.parts.metrics.retried(failure.trouble.value, failure.worker_id)
            if failure.trouble is Trouble.SOURCE:
                self.parts.placements.pairs.failed((failure.worker_id, self.placement.decode.worker_id))
            names = {"request_id": state.request_id, "trace_id": state.trace.trace_id}
            log.info("request %s, epoch %d: %s", state.request_id, state.epoch, failure.message, extra=names)
            if self._finish_if_complete():
                return
            generated = len(state.tokens) - before
            if generated >= PROGRESS_TOKENS or not self._retries:
                self._made_progress()
            if failure.counts:
                state.failures.add(failure.worker_id)
            state.suspicion.note(failure, alone=alone, generated=generated)
            self._retries += 1
            self._last_failure = failure.message
            await self._recover(failure)

    def _made_progress(self) -> None:
        self.state.failures.clear()
        self._retries = 0
        self._lacking.clear()
        self._full.clear()
        self._give_up = time.monotonic() + self.parts.replace_wait_s

    # -- placements

    @property
    def placement(self) -> Placement:
        """The current placement. Raises RuntimeError before the first one."""
        if self._placement is None:
            raise RuntimeError(f"request {self.state.request_id} was not placed")
        return self._placement

    async def _place(self, service: ServiceClass) -> None:
        state, placements = self.state, self.parts.placements
        suspects, asked = self.parts.pool.suspects(), time.monotonic()
        suspects |= placements.avoidable(self._full, state.excluded | suspects)
        placement = await placements.place(state, suspects, service)
        if self._placement is None:
            self.parts.metrics.live_requests.inc()
        else:
            self._report("retried")
        self._placement = placement
        state.placed(placement, asked)

    def _check_worth(self, failure: Failure) -> None:
        state = self.state
        if failure.trouble is Trouble.INVALID:
            raise Unsupported(failure.message)
        if failure.trouble is Trouble.MEDIA:
            self._lacking[failure.worker_id] += 1
            if self._lacking[failure.worker_id] > IMAGES_AGAIN:
                raise RequestFailed(f"{failure.message}, also right after it was sent", 1.0)
        if state.suspicion.convicted:
            self.parts.metrics.suspects.labels("convicted").inc()
            self.parts.convicts.add(state.request_id, state.engine_request, failure.message)
            raise EngineBroken(f"an engine failed while it ran this request alone: {failure.message}")

    async def _recover(self, failure: Failure) -> None:
        state = self.state
        self._check_worth(failure)
        step = next_step(
            failure,
            failures_left=self.parts.max_attempts - len(state.failures),
            tokens_to_prefill=state.tokens_to_prefill,
        )
        if step is RecoveryStep.GIVE_UP:
            error = RequestFailed(
                f"{len(state.failures)} workers of at most {self.parts.max_attempts} failed under the "
                f"request: {failure.message}",
                retry_after_s=1.0,
            )
            error.final = state.suspicion.suspect  # a retry may kill more workers
            raise error
        if state.suspicion.suspect:
            self._abort_workers()
            self.parts.quarantine.note(failure, self.placement, state.excluded)
            return
        if step is RecoveryStep.SAME_WORKERS:
            self._same_workers(failure)
            return
        if failure.trouble is Trouble.MEDIA:
            # Not the worker's fault. At first, the decode worker computes the prompt itself.
            if self._retries > 1 or failure.worker_id != self.placement.decode.worker_id:
                await self._place_again()
                return
        elif step is RecoveryStep.PLACE_AGAIN:
            (self._full if failure.trouble is Trouble.FULL else state.excluded).add(failure.worker_id)
            if not failure.decode_side_is_fine:
                await self._place_again()
                return
            self._stop_prefill()
            try:
                await self._place(state.service)
            except NotAdmitted:
                # No other prefill worker has room: the decode worker prefills.
                self._placement = self.parts.placements.hold_on(state, self.placement)
            else:
                return
        self._compute_here()

    def _same_workers(self, failure: Failure) -> None:
        self.state.goes_without(failure.trouble)
        self.state.epoch += 1  # workers refuse an epoch that they have seen
        if failure.trouble is Trouble.PREFIX:
            self._placement = replace(self.placement, source=None)

    def _compute_here(self) -> None:
        self.parts.metrics.recomputed_prompts.inc()
        self.state.recomputes()
        self.state.epoch += 1  # workers refuse an epoch that they have seen
        self._stop_prefill()
        self._placement = self.parts.placements.without_prefill(self.placement)

    def _stop_prefill(self) -> None:
        if self.placement.prefill is not None:
            self.parts.pool.abort(self.placement.prefill.worker_id, self.state.request_id)

    async def _place_again(self) -> None:
        """Get the next placement, waiting for room and for workers to come back.

        Raises RequestFailed if that takes too long, or if no worker could ever take the request.
        """
        state = self.state
        self._abort_workers()
        self._report("retried")  # frees the booking first: the best placement may be on the same workers
        because = self._last_failure
        within = f" within {self.parts.replace_wait_s:g} s (a tenth of router.request_timeout_s)"
        while time.monotonic() <= self._give_up:
            await asyncio.sleep(backoff_s(self._retries))
            try:
                wait_s = min(EXCLUDED_S, self._give_up - time.monotonic())
                return await self.parts.waiting.resume(wait_s, self._place)
            except NotAdmitted as error:
                self.parts.metrics.rejections.labels(error.why).inc()
                self._retries = max(self._retries, 1) + 1
                self._last_failure = f"{because}; and {error.message}"
                if error.never:
                    within = ""
                    break
                if not error.waiting_helps or error.why is Why.FULL:
                    # No other worker is alive or has room, and later requests are waiting for this one.
                    # Try the workers that failed it again: perhaps only a connection broke.
                    state.excluded.clear()
        raise RequestFailed(f"no worker can take over{within}: {self._last_failure}", retry_after_s=1.0)

    def _report(self, outcome: str) -> None:
        self.parts.placements.finished(self.state, self.placement.attempt, outcome)

    async def _place_trial(self) -> None:
        state = self.state
        worker = self.parts.quarantine.worker_for(self.placement, state.excluded, state.adapter)
        if worker is not None and self.parts.pool.opened(worker.worker_id) is not None:
            state.epoch += 1  # workers refuse an epoch that they have seen; the bookings stay
            await asyncio.sleep(backoff_s(self._retries))
        else:
            await self._place_again()
            worker = self.placement.decode
            if self.placement.prefill is not None:  # frees its booking
                self.parts.placements.reports.prefilled(self.placement.attempt)
        self.parts.quarantine.use(worker)
        self._placement = replace(self.placement, prefill=None, source=None, decode=worker)
        state.recomputes(alone=worker)

    async def _attempt_alone(self) -> Failure | None:
        """Try the request alone in an engine, then get a placement to continue as usual.

        Return the trial's failure; None if it passed and is placed again, or the request has ended.
        """
        state = self.state
        tokens = state.suspicion.trial_tokens(state.tokens_to_generate)
        async with self.parts.quarantine.turn(state.tokens_to_prefill, tokens):
            self._give_up = time.monotonic() + self.parts.replace_wait_s  # the wait for a turn does not count
            await self._place_trial()
            leg = DecodeLeg(self, alone_tokens=tokens, more_alone=self.parts.quarantine.more)
            failure = await leg.run()
        if failure is not None or state.over or state.complete:
            return failure
        self.parts.metrics.suspects.labels("passed").inc()
        state.suspicion.passed()
        self._made_progress()
        await self._place_again()
        return None

    def _finish_if_complete(self) -> bool:
        """End the request if it has all its tokens: an engine must not be asked for more."""
        if not self.state.complete:
            return False
        self.state.outcome = "length"
        self._abort_workers()
        self.close()
        self.sink.finish("length")
        return True

    def _fail(self, error: RequestFailed, outcome: str = "error") -> None:
        if self.state.over:
            return
        self.state.outcome = outcome
        self._abort_workers()
        self.sink.fail(error)

    def _abort_workers(self) -> None:
        if self._placement is None:
            return
        for worker in (self._placement.prefill, self._placement.decode):
            if worker is not None:
                self.parts.pool.abort(worker.worker_id, self.state.request_id)

    def _timed_out(self) -> RequestFailed:
        because = f"; {self._last_failure}" if self._last_failure else ""
        if self._placement is None:
            because = "; it was waiting for room on the workers"
        allowed_s = self.state.deadline - self.state.arrived
        why = f"the request took longer than {allowed_s:.3g} s{because}"
        return RequestFailed(why, status=HTTPStatus.GATEWAY_TIMEOUT)

    def _first_token(self) -> None:
        self.parts.counts.first_token(self.state)
        prefiller = self.placement.prefill or self.placement.decode
        self.parts.metrics.first_token(self.state, prefiller.worker_id)

    # -- called by the legs

    def grow(self) -> bool:
        """Reserve memory for more output. Return False if there is none; the request then ends."""
        try:
            self.parts.journal.grow(self.state)
        except Overloaded as error:
            self._fail(error)
            if self._task is not None:
                self._task.cancel()
        return not self.state.over

    def close(self) -> None:
        """Release the request's resources once it has its outcome. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.state.ended = time.monotonic()
        self.parts.journal.leave(self.state)
        if self._placement is not None:
            self._report(self.state.outcome)
        if self._admitted:
            self.parts.waiting.left(self.state.service)
        self.parts.metrics.over(self.state)
        self.parts.counts.over(self.state)
        self._on_over(self)
