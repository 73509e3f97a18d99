"""Run one rank's loads, from the reservation of blocks to the report: states, queues, threads, time limits.

    RESERVED --manifest--> QUEUED --slot--> PULLING --all records--> HELD --first token--> reported
        ^                                      |               (at once if the token came first)
        +---------- failed early pull ---------+

No running request uses the blocks of a load, and every reserved job is reported exactly once, because the
engine holds the blocks until then. An early pull, from a manifest that comes before the prompt is complete,
brings the records of each prefill step. If it fails, it is retried later, unless the source may already have
dropped records.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.handoff.channels import HandoffClient
from baton.handoff.config import EARLY_PULL_S, PULLED_TOKENS_PER_S
from baton.handoff.errors import HandoffError, PullCancelled, TransportFailed
from baton.handoff.forms import Share
from baton.handoff.load.pull import LoadJob, Progress, Pulls
from baton.handoff.manifest import Puller
from baton.handoff.memory.cache import BlockCache
from baton.handoff.memory.streams import Mark
from baton.handoff.reports import Key, Problem, ShardLoad
from baton.handoff.transports.base import Transport
from baton.keeping import keep_thread
from baton.protos.handoff_pb2 import Manifest

logger = logging.getLogger(__name__)

MOVING = 2  # concurrent pulls that make progress
STALLED_S = 1.0  # a pull without a byte for this long is stalled; even slow networks bring some sooner
THREADS = 8  # MOVING pulls, plus the stalled pulls of three sources
EARLY = 4  # concurrent early pulls, which mostly wait for the source's next step and hold a thread there
_LOOK_S = STALLED_S / 4  # interval of checks for stalled pulls while others wait


class State(enum.Enum):
    """The state of an unreported load."""

    RESERVED = "has blocks and nothing to pull yet"
    QUEUED = "waits for a slot"
    PULLING = "a thread writes to its blocks"
    HELD = "complete, but its request has no first token yet"


@dataclass(eq=False)
class _Load:
    job: LoadJob
    after: Mark | None  # engine work that was queued when the blocks were allocated
    progress: Progress
    state: State = State.RESERVED
    manifest: Manifest | None = None
    whole_s: float = 0.0  # when the prompt was complete; 0: not yet
    has_token: bool = False
    failed: bool = False  # its early pull failed: wait for the complete prompt
    cancelled: bool = False

    @property
    def source(self) -> str:
        return self.manifest.worker_id if self.manifest is not None else ""


class _Turns:
    """A queue of pulls: few run at once, and an unresponsive source does not block the others. Thread-safe.

    More concurrent pulls would share the memory bus and the engine's cores, and all would end later. If a
    network is cut, a pull stalls for seconds until its connection is found dead. A stalled pull does not
    count towards the limit, so pulls from other sources overtake it; pulls from the same source wait.
    """

    def __init__(self, moving: int = MOVING, stalled_s: float = STALLED_S) -> None:
        self._moving = moving
        self._stalled_s = stalled_s
        self._waiting: deque[_Load] = deque()  # oldest first
        self._begun: list[_Load] = []
        self._changed = threading.Condition()
        self._closed = False

    def add(self, load: _Load) -> None:
        with self._changed:
            self._waiting.append(load)
            self._changed.notify()

    def leave(self, load: _Load) -> bool:
        """Remove a load from the queue. Return False if it is not waiting there."""
        with self._changed:
            waits = load in self._waiting
            if waits:
                self._waiting.remove(load)
            return waits

    def take(self) -> _Load | None:
        with self._changed:
            while not (self._closed and not self._waiting):
                if (load := self._next()) is not None:
                    self._waiting.remove(load)
                    load.progress.heard_s = time.monotonic()
                    self._begun.append(load)
                    return load
                self._changed.wait(_LOOK_S if self._waiting else None)
            return None

    def over(self, load: _Load) -> None:
        with self._changed:
            self._begun.remove(load)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> _Load | None:
        latest = time.monotonic() - self._stalled_s
        stalled = [load for load in self._begun if load.progress.heard_s < latest]
        if len(self._begun) - len(stalled) >= self._moving:
            return None
        silent = {load.source for load in stalled}
        return next((load for load in self._waiting if load.source not in silent), None)


class Loader:
    """The loads of one rank. Only `close` waits for pulls, and only `begin` is thread-safe."""

    def __init__(
        self,
        cache: BlockCache,
        puller: Puller,
        transports: Sequence[Transport],
        client: HandoffClient,
        *,
        pull_timeout_s: float,
        chunk_bytes: int,
    ) -> None:
        """Load into `cache`. transports: best first; the caller closes them after the loader."""
        self._cache = cache
        self._puller = puller
        self.transports = list(transports)
        self._pulls = Pulls(cache, puller, self.transports, client, chunk_bytes)
        self._pull_timeout_s = pull_timeout_s
        self._loads: dict[Key, _Load] = {}
        self._finished: list[ShardLoad] = []
        self.on_finished: Callable[[], object] = lambda: None  # called on any thread
        self._lock = threading.Lock()
        self._turns = _Turns()
        self._early = _Turns(EARLY, math.inf)
        self._threads = [
            keep_thread(partial(self._work, turns), f"baton-{name}-{number}")
            for turns, name, threads in ((self._turns, "pull", THREADS), (self._early, "early", EARLY))
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def reserve(self, job: LoadJob) -> None:
        """Start a load, whose blocks are allocated; pull at once if its manifest has arrived."""
        load = _Load(job, self._cache.mark(), Progress(job))
        with self._lock:
            self._loads[job.key] = load
            load.has_token = job.complete
            if job.manifest is not None:
                whole = job.complete or job.manifest.saved_at_s
                whole_s = time.monotonic() - job.waited_s if whole else 0.0
                self._begin(load, job.manifest, whole_s)

    def begin(self, key: Key, manifest: Manifest) -> None:
        """Start to pull a prompt, complete or not. Idempotent; ignores loads without blocks."""
        with self._lock:
            if (load := self._loads.get(key)) is not None:
                self._begin(load, manifest, time.monotonic() if manifest.saved_at_s else 0.0)

    def complete(self, key: Key, manifest: Manifest) -> None:
        """Record that the prompt is complete and the request has its first token."""
        with self._lock:
            load = self._loads.get(key)
            if load is None or load.has_token:
                return
            load.has_token = True
            self._begin(load, manifest, time.monotonic())
            reported = load.state is State.HELD
            if reported:
                self._report(load, None)
        if reported:
            self.on_finished()

    def cancel(self, keys: Iterable[Key]) -> None:
        """Stop loads. Each is still reported, once nothing writes to its blocks."""
        for key in keys:
            with self._lock:
                load = self._loads.get(key)
                if load is None or load.cancelled:
                    continue  # e.g. cancelled by another rank's failure, then by the request's end
                load.cancelled = True
                waited = load.state is not State.PULLING and (
                    load.state is not State.QUEUED or self._early.leave(load) or self._turns.leave(load)
                )
                if waited:
                    problem = Problem.of(PullCancelled(f"request {load.job.request_id!r}: cancelled"))
                    self._report(load, None if load.state is State.HELD else problem)
            if not waited:
                load.progress.cancellation.set()
                continue
            if load.state is State.QUEUED and load.whole_s and load.manifest is not None:
                self._pulls.release(load.job, load.manifest, (), failed=True)
            self.on_finished()

    def take_finished(self) -> list[ShardLoad]:
        """Return the loads that ended since the last call. Nothing uses their blocks any more."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Cancel all loads and wait for the threads. Idempotent."""
        with self._lock:
            wanted = list(self._loads)
        self.cancel(wanted)
        self._turns.close()
        self._early.close()
        for thread in self._threads:
            thread.join()

    # ---- under the lock

    def _begin(self, load: _Load, manifest: Manifest, whole_s: float) -> None:
        """Advance a load that has a manifest. whole_s: when the prompt was complete; 0: not yet."""
        if whole_s and not load.whole_s:
            load.whole_s = whole_s
            if load.state is State.PULLING:
                load.progress.whole_s = whole_s
                cancellation = load.progress.cancellation
                cancellation.deadline = min(cancellation.deadline, whole_s + self._limit_s(load.job))
            elif load.state is State.QUEUED and self._early.leave(load):
                load.state = State.RESERVED  # move from the early queue to the ordinary one below
        if load.state is State.RESERVED and (load.whole_s or not load.failed):
            load.manifest, load.state = manifest, State.QUEUED
            (self._turns if load.whole_s else self._early).add(load)

    def _limit_s(self, job: LoadJob) -> float:
        """Return the time limit for pulling a complete prompt; a slower pull is worse than computing it."""
        return min(EARLY_PULL_S, self._pull_timeout_s + job.tokens / PULLED_TOKENS_PER_S)

    def _report(self, load: _Load, problem: Problem | None) -> None:
        del self._loads[load.job.key]
        self._finished.append(load.progress.report(self._puller.rank, problem))

    # ---- on the pulling threads

    def _work(self, turns: _Turns) -> None:
        while (load := turns.take()) is not None:
            try:
                self._run(load)
            finally:
                turns.over(load)

    def _run(self, load: _Load) -> None:
        job, now = load.job, time.monotonic()
        with self._lock:
            load.state, progress, described = State.PULLING, load.progress, load.manifest
            if load.cancelled:
                progress.cancellation.set()
            progress.heard_s, progress.whole_s = now, load.whole_s
            progress.wait = now - load.whole_s if load.whole_s else 0.0
            progress.cancellation.deadline = now + (self._limit_s(job) if load.whole_s else EARLY_PULL_S)
        if described is None:
            raise AssertionError(f"load {job.key} was queued without a manifest")
        problem, shares = self._pull(load, progress, described)
        with self._lock:
            # whether the save can be pulled again
            kept = problem is not None and not load.whole_s and not progress.dropped
            again = kept and not load.cancelled
            if again:
                load.state, load.failed, load.progress = State.RESERVED, True, Progress(job)
            elif problem is None and not load.has_token and not load.cancelled:
                load.state = State.HELD
            else:
                self._report(load, problem)
            reported = job.key not in self._loads
        if again:
            logger.info("request %r: the early pull failed, trying again later: %s", job.request_id, problem)
        if reported:
            self.on_finished()
        if not kept:
            self._pulls.release(job, described, shares, failed=problem is not None)

    def _pull(
        self, load: _Load, progress: Progress, described: Manifest
    ) -> tuple[Problem | None, Sequence[Share]]:
        job = load.job
        shares: Sequence[Share] = ()
        try:
            shares = self._pulls.check(job, described)
            self._pulls.pull(progress, described, shares, load.after)
        except HandoffError as error:
            lost = next((each.error for each in progress.acks if each.error is not None), None)
            return Problem.of(lost or error), shares
        except Exception as error:  # an unreported load would hold its request forever
            logger.exception(
                "loading request %r failed unexpectedly", job.request_id, extra={"request_id": job.request_id}
            )
            failed = TransportFailed(f"request {job.request_id!r}: {type(error).__name__}: {error}")
            return Problem.of(failed), shares
        return None, shares
