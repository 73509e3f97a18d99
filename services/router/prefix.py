"""The KV of a prompt's beginning, brought from a worker that holds it to the one that prefills the rest.

The scheduler names such a worker as a placement's source: mostly the one that decoded the chat's last turn.
Before the PREFILL it is asked, by a SAVE, to hand over what it holds; the PREFILL carries the manifest. That
is an extra: whatever goes wrong with it is counted, and the prefill worker computes all of the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from baton.attempts import prefix_id
from baton.protos import handoff_pb2, scheduler_pb2, worker_pb2
from baton.scheduler.client import Placement
from baton.services.router.errors import WorkerUnreachable
from baton.services.router.metrics import RouterMetrics
from baton.services.router.pairs import Pair, Pairs
from baton.services.router.pool import WorkerPool
from baton.services.router.recovery import Failure, Trouble
from baton.services.router.state import RequestState

# From the SAVE to its manifest, with the way to a worker that was not reached before: longer than some steps
# of a decode worker. A source that does not answer costs its prompt no more.
SAVE_TIMEOUT_S = 1.0


class PrefixSave:
    """A StreamListener: one SAVE, until its manifest, or the word for why there is none."""

    def __init__(self, state: RequestState) -> None:
        self.request_id = prefix_id(state.request_id)
        self.epoch = state.epoch
        self.over: asyncio.Future[handoff_pb2.Manifest | str] = asyncio.get_running_loop().create_future()

    def on_output(self, output: Any, clock_offset_s: float) -> None:
        """Drop the token: it is not the request's."""

    def on_gap(self, engine_s: float, wire_s: float, received: float) -> None:
        """Drop a sample: nobody waits for a second token."""

    def on_begun(self, begun: worker_pb2.Begun) -> None:
        """Do nothing: the prefill begins with all of it."""

    def on_saved(self, saved: worker_pb2.Saved) -> None:
        """Take the manifest."""
        self._end(saved.manifest if saved.HasField("manifest") else "not_kept")

    def on_admitted(self, admitted: worker_pb2.Admitted) -> None:
        """Do nothing: a SAVE loads nothing."""

    def on_shared(self, shared: worker_pb2.Shared) -> None:
        """Do nothing: nothing is booked for it."""

    def on_failed(self, failed: worker_pb2.Failed) -> None:
        """End it: the source holds less than the scheduler knew, or takes nothing now."""
        self._end("not_cached" if failed.code == worker_pb2.Failed.CODE_HANDOFF else "refused")

    def on_lost(self, message: str) -> None:
        """End it: the source is gone."""
        del message
        self._end("lost")

    def _end(self, how: handoff_pb2.Manifest | str) -> None:
        if not self.over.done():
            self.over.set_result(how)


class Prefixes:
    """The beginning of one request's prompt, attempt by attempt. At most one save waits to be pulled."""

    def __init__(self, state: RequestState, pool: WorkerPool, pairs: Pairs, metrics: RouterMetrics) -> None:
        self._state = state
        self._pool = pool
        self._pairs = pairs
        self._metrics = metrics
        self._saved: Pair | None = None  # the source that keeps it, and the worker that is to pull it

    async def save(self, placement: Placement) -> handoff_pb2.Manifest | None:
        """Have the placement's source save what it holds, for `SAVE_TIMEOUT_S` at most.

        None: there is nothing to pull, and the prefill worker computes the prompt from its beginning.
        """
        source, prefill, state = placement.source, placement.prefill, self._state
        # One token more than is held: the source computes it, as any request computes one. And never all.
        tokens = min(placement.source_tokens + 1, state.prompt_tokens - 1)
        if source is None or prefill is None or tokens < 1 or state.prompt_logprobs:
            return None  # with the last of these a prompt is computed whatever is cached
        pair = source.worker_id, prefill.worker_id
        if self._pairs.avoid(pair):
            self._metrics.prefix_pull("avoided")
            return None
        found: handoff_pb2.Manifest | str = "late"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAVE_TIMEOUT_S):
                found = await self._ask(source, tokens)
        state.timings.prefix_saved = time.monotonic()
        if isinstance(found, str):
            self._metrics.prefix_pull(found)
            return None
        self._saved = pair
        return found

    def watched(self, on_lost: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
        """Call `on_lost` if the source is lost inside the block, while what it saved is pulled."""
        if self._saved is None:
            return contextlib.nullcontext()
        return self._pool.watch_pull(self._saved[0], prefix_id(self._state.request_id), on_lost)

    def loaded(self, admitted: worker_pb2.Admitted) -> None:
        """Note that the prefill worker has it: there is nothing left at the source."""
        self._state.timings.prefix_loaded = time.monotonic()
        self._state.timings.prefix = admitted
        self._metrics.prefix_pull("loaded", admitted.tokens)
        if self._saved is not None:
            self._pairs.passed(self._saved)
        self._saved = None

    def over(self, failure: Failure | None) -> None:
        """Note the end of the prefill. Where that could not get it, these two are not tried for a while."""
        if failure is not None and failure.trouble is Trouble.PREFIX and self._saved is not None:
            self._metrics.prefix_pull("failed")
            self._pairs.failed(self._saved)

    def drop(self) -> None:
        """Release what was saved and is not wanted any more."""
        if self._saved is not None:
            self._pool.abort(self._saved[0], prefix_id(self._state.request_id))
        self._saved = None

    async def _ask(self, source: scheduler_pb2.Worker, tokens: int) -> handoff_pb2.Manifest | str:
        """Send the SAVE and wait for its end. A source that is given up is told to drop it."""
        one, state = PrefixSave(self._state), self._state
        start = worker_pb2.Start(
            request_id=one.request_id,
            epoch=one.epoch,
            phase=worker_pb2.PHASE_SAVE,
            engine_request=state.engine_request,
            traceparent=state.trace.traceparent,
            prefix_tokens=tokens,
        )
        try:
            stream = await self._pool.stream(source)
        except WorkerUnreachable:
            return "lost"
        if not stream.begin(one, start):
            return "refused"
        try:
            return await one.over
        except asyncio.CancelledError:  # even where it has just been saved: nobody will hear of that
            stream.abort(one.request_id)
            raise
        finally:
            stream.forget(one)
