"""A rank's loads: pulled, checked and written into the engine's cache on threads of their own.

The blocks of a load belong to its request and to nobody in the running batch, so the engine's steps go on
meanwhile. Every job submitted is reported exactly once, however it ends: the engine holds the blocks until
then.

An early load pulls what a prompt's steps leave while the next ones are computed. Once the prompt is complete,
`resume` says so, and an early load that went well is reported only after that: its request could not go on.

Where the source has more ranks or fewer (forms.py), a load takes its heads out of several shards, a chunk of
each in turns: they grow together. What has been taken of a save with fewer slots than records is gone there
(taken.py): a load that fails after that gives the save up.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.handoff import digests, manifest
from baton.handoff.channels import HandoffClient
from baton.handoff.config import EARLY_PULL_S
from baton.handoff.errors import (
    HandoffError,
    MalformedManifest,
    PullCancelled,
    PullTimeout,
    TransportFailed,
)
from baton.handoff.forms import Share
from baton.handoff.groups import Part, runs
from baton.handoff.load.taken import Taken
from baton.handoff.load.turns import EARLY, THREADS, Turns
from baton.handoff.manifest import Puller
from baton.handoff.memory.cache import BlockCache, Landing
from baton.handoff.memory.streams import Mark
from baton.handoff.records import Records
from baton.handoff.reports import Costs, Problem, ShardLoad
from baton.handoff.transports import choose
from baton.handoff.transports.base import Cancellation, Pull, Transport
from baton.keeping import keep_thread
from baton.protos.handoff_pb2 import Manifest

logger = logging.getLogger(__name__)

_ENDED = object()
Key = tuple[str, int]  # request id, epoch


@dataclass(frozen=True)
class LoadJob:
    """An order to pull these records of the manifest's into these cache blocks."""

    request_id: str
    epoch: int
    manifest: bytes
    parts: tuple[Part, ...]
    arrived_s: float  # at the engine; CLOCK_MONOTONIC
    source: str = ""  # the worker that saved it
    early: bool = False  # the prompt is still computed there
    saved_as: str = ""  # the request as which it was saved; empty: this one

    @property
    def saved_id(self) -> str:
        """The id by which the source knows it."""
        return self.saved_as or self.request_id

    @property
    def key(self) -> Key:
        """Request id and epoch."""
        return self.request_id, self.epoch


@dataclass
class _Progress:
    """The progress of a load; its times are in seconds."""

    job: LoadJob
    after: Mark | None  # the engine's work that was queued before the blocks became the load's
    cancellation: Cancellation = field(default_factory=Cancellation)
    heard_s: float = 0.0  # time.monotonic; when it began, or bytes came last
    resumed_s: float = 0.0  # of an early load: when its prompt was complete; its times count from then on
    ends_s: float = math.inf  # and its deadline from then on, if its pull had begun before
    late: bool = False  # it missed that
    taken: list[Taken] = field(default_factory=list)  # of each shard, once its pull has begun
    transport: str = ""
    bytes: int = 0
    early_bytes: int = 0
    blocks: int = 0
    wait: float = 0.0
    move: float = 0.0
    check: float = 0.0
    load: float = 0.0

    @property
    def source(self) -> str:
        return self.job.source

    @property
    def early(self) -> bool:
        """Whether its prompt is still computed, as far as is known here."""
        return self.job.early and not self.resumed_s

    def report(self, rank: int, problem: Problem | None) -> ShardLoad:
        costs = Costs(*(value * 1e3 for value in (self.wait, self.move, self.check, self.load)))
        return ShardLoad(
            self.job.request_id,
            self.job.epoch,
            rank,
            self.transport,
            self.bytes,
            self.blocks,
            costs,
            problem,
            self.early_bytes,
        )


class Loader:
    """The loads of one rank: queued, running and finished.

    `submit`, `resume`, `cancel` and `take_finished` are called on the engine's thread and return at once. The
    queue is never longer than the number of requests for whose blocks the engine found room.
    """

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
        """Load into `cache`.

        transports: best first; they are closed by whoever made them, after the loader.
        """
        self._cache = cache
        self._puller = puller
        self.transports = list(transports)
        self._client = client
        self._pull_timeout_s = pull_timeout_s
        self._chunk_bytes = chunk_bytes
        self._running: dict[Key, _Progress] = {}
        self._held: dict[Key, ShardLoad] = {}  # early loads that went well, until they are resumed
        self.on_finished: Callable[[], object] = lambda: None  # called on the load's thread
        self._finished: list[ShardLoad] = []
        self._lock = threading.Lock()
        self._turns: Turns[_Progress] = Turns()
        self._early: Turns[_Progress] = Turns(EARLY, math.inf)
        self._threads = [
            keep_thread(partial(self._work, turns), f"baton-{name}-{number}")
            for turns, name, threads in ((self._turns, "pull", THREADS), (self._early, "early", EARLY))
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: LoadJob) -> None:
        """Queue a load; its deadline runs from the beginning of its pull, or from `resume`."""
        progress = _Progress(job, self._cache.mark())
        with self._lock:
            self._running[job.key] = progress
        (self._early if job.early else self._turns).add(progress)

    def resume(self, keys: Iterable[Key]) -> None:
        """Note that the prompts of these early loads are complete, and their requests can go on."""
        for key in keys:
            with self._lock:
                progress = self._running.get(key)
                if progress is not None:
                    progress.resumed_s = time.monotonic()
                elif key in self._held:
                    self._finished.append(self._held.pop(key))
            if progress is None:
                continue
            if self._early.leave(progress):
                self._turns.add(progress)  # as any other: its time runs from its own beginning
            else:
                progress.ends_s = progress.resumed_s + self._pull_timeout_s

    def cancel(self, keys: Iterable[Key]) -> None:
        """Stop pulling for requests that ended. Each is still reported, once nothing writes its blocks."""
        wanted = []
        with self._lock:
            # One may be told twice: by another rank's failure, and by its request's end.
            for key in dict.fromkeys(keys):
                if key in self._running:
                    wanted.append(self._running[key])
                elif key in self._held:
                    self._finished.append(self._held.pop(key))
        for progress in wanted:
            progress.cancellation.set()
            if self._early.leave(progress):  # those before it may take as long as their prompts
                self._end(
                    progress, Problem.of(PullCancelled(f"request {progress.job.request_id!r}: cancelled"))
                )
        with self._lock:  # one that ended meanwhile may have found itself not cancelled yet
            for key in [progress.job.key for progress in wanted if progress.job.key in self._held]:
                self._finished.append(self._held.pop(key))

    def take_finished(self) -> list[ShardLoad]:
        """Return the loads that ended since the last call; nothing touches their blocks from now on."""
        now = time.monotonic()
        with self._lock:
            late = [one for one in self._running.values() if one.ends_s < now and not one.late]
            finished, self._finished = self._finished, []
        for progress in late:
            progress.late = True
            progress.cancellation.set()
        return finished

    def close(self) -> None:
        """Cancel all loads and wait for the threads. Idempotent."""
        with self._lock:
            wanted = list(self._running)
        self.cancel(wanted)
        self._turns.close()
        self._early.close()
        for thread in self._threads:
            thread.join()

    def _work(self, turns: Turns[_Progress]) -> None:
        while (progress := turns.take()) is not None:
            try:
                self._run(progress)
            finally:
                turns.over(progress)

    def _run(self, progress: _Progress) -> None:
        job = progress.job
        progress.wait = 0.0 if progress.early else time.monotonic() - (progress.resumed_s or job.arrived_s)
        problem: Problem | None = None
        described: Manifest | None = None
        shares: tuple[Share, ...] = ()
        try:
            described = manifest.read(job.manifest)
            shares = manifest.check(described, job.saved_id, job.epoch, self._puller)
            self._pull(progress, described, shares)
        except HandoffError as error:
            lost = next((each.error for each in progress.taken if each.error is not None), None)
            problem = Problem.of(_timed_out(job) if progress.late else lost or error)
        except Exception as error:  # a load that is not reported would hold its request for ever
            logger.exception(
                "loading request %r failed unexpectedly", job.request_id, extra={"request_id": job.request_id}
            )
            problem = Problem.of(
                TransportFailed(f"request {job.request_id!r}: {type(error).__name__}: {error}")
            )
        early = self._end(progress, problem)
        # One that failed early leaves all there, if nothing of it is gone: the prompt goes on, and its KV may
        # come whole at its end.
        leaves = early and problem is not None and not any(each.told for each in progress.taken)
        if described is not None and not leaves:
            self._release(job, described, shares, problem)  # now: the request waits for nothing here

    def _end(self, progress: _Progress, problem: Problem | None) -> bool:
        """Report a load, or hold it until its prompt is complete. Return whether that is still computed."""
        with self._lock:
            self._running.pop(progress.job.key, None)
            report, early = progress.report(self._puller.rank, problem), progress.early
            if early and problem is None and not progress.cancellation.is_set:
                self._held[progress.job.key] = report
            else:
                self._finished.append(report)
        self.on_finished()
        return early

    def _release(
        self, job: LoadJob, described: Manifest, shares: Sequence[Share], problem: Problem | None
    ) -> None:
        """Release what this attempt has pulled, all ranks' shards if it failed; never another attempt's."""
        if not manifest.is_of(described, job.saved_id, job.epoch):
            return
        if problem is not None:
            self._client.release_soon(described)
            return
        for share in shares:
            shard, reader = described.shards[share.rank], (self._puller.rank, share.readers)
            self._client.release_soon(described, confirmed=True, shards=[shard], reader=reader)

    def _pull(self, progress: _Progress, described: Manifest, shares: Sequence[Share]) -> None:
        seed = digests.seed(progress.job.saved_id, progress.job.epoch)
        # A pull from a prompt that is still computed ends with it; from then on `take_finished` looks at it.
        deadline = time.monotonic() + (EARLY_PULL_S if progress.early else self._pull_timeout_s)
        landings: list[Landing] = []
        coming: list[Generator[None]] = []
        try:
            for share in shares:
                pulls = self._pulls(progress, described, share, deadline)
                if not pulls:
                    continue
                transport = choose(self.transports, pulls[0].shard)
                progress.transport = transport.name
                pulls[0].check_time()
                landing = self._cache.landing(pulls[0].what, seed, progress.after, share)
                landings.append(landing)
                reader = self._puller.rank, share.readers
                taken = Taken(self._client, pulls[0], progress.cancellation.set, reader)
                progress.taken.append(taken)
                coming.append(_land(progress, landing, taken, transport, pulls))
            while coming:
                coming = [each for each in coming if next(each, _ENDED) is not _ENDED]
                if progress.early:  # all so far is hidden behind the prompt's own steps
                    progress.early_bytes = progress.bytes
                    progress.move = 0.0
                    progress.check = -sum(each.check_s for each in landings)
                    progress.load = -sum(each.load_s for each in landings)
            for landing in landings:
                landing.finish()
            for taken in progress.taken:
                taken.end()
        finally:
            for each in coming:
                each.close()
            for landing in landings:
                landing.close()
                progress.check += landing.check_s
                progress.load += landing.load_s

    def _pulls(self, progress: _Progress, described: Manifest, share: Share, deadline: float) -> list[Pull]:
        """Return an order for each run of records, all under one deadline: mostly there is one.

        Where the prefix cache has the first blocks, what is missing of each group lies apart.
        """
        job = progress.job
        pulls = []
        for first, stop in runs(self._parts(job, share)):
            if stop > described.num_blocks:
                raise MalformedManifest(
                    f"request {job.request_id!r}: blocks {first} to {stop} are needed;"
                    f" the source has {described.num_blocks}"
                )
            pulls.append(
                Pull(
                    request_id=job.saved_id,
                    epoch=job.epoch,
                    shard=described.shards[share.rank],
                    saved_blocks=described.num_blocks,
                    first_block=first,
                    num_blocks=stop - first,
                    deadline=deadline,
                    chunk_bytes=self._chunk_bytes,
                    cancellation=progress.cancellation,
                )
            )
        return pulls

    def _parts(self, job: LoadJob, share: Share) -> list[Part]:
        """Return the parts of the groups of which this rank takes heads of the shard."""
        groups = {self._puller.layers[cut.layer].group for cut in share.cuts}
        return [part for part in job.parts if part.group in groups]


def _land(
    progress: _Progress, landing: Landing, taken: Taken, transport: Transport, pulls: Sequence[Pull]
) -> Generator[None]:
    """Bring all of it, a chunk with each `next`. Raises TransportFailed for less."""
    blocks = 0
    for pull in pulls:
        if taken.is_due(pull.first_block):
            landing.finish()
            taken.pass_over(pull.first_block)
        stop = pull.first_block
        with contextlib.closing(_chunks(transport, pull)) as chunks:
            while True:
                start = time.monotonic()
                records = next(chunks, None)
                progress.move += time.monotonic() - max(start, progress.resumed_s)
                if taken.is_due(stop):  # the transport has found them left alone until now
                    landing.finish()
                    taken.tell(stop)
                if records is None:
                    break
                progress.heard_s = time.monotonic()
                first, stop = records.first_block, records.first_block + len(records.data)
                for part in (whole.within(first, stop) for whole in progress.job.parts):
                    if part.block_ids:
                        own = slice(part.first - first, part.stop - first)
                        landing.take(part, records.data[own], records.digests[own])
                        blocks += len(part.block_ids)
                progress.blocks = max(progress.blocks, blocks)
                progress.bytes += records.data.size
                yield
    wanted = sum(pull.num_blocks for pull in pulls)
    if blocks != wanted:
        raise TransportFailed(f"{landing.what}: {blocks} of {wanted} blocks came")


def _chunks(transport: Transport, pull: Pull) -> Generator[Records]:
    """Yield a pull's chunks; what transports return need not be closable."""
    yield from transport.pull(pull)


def _timed_out(job: LoadJob) -> PullTimeout:
    return PullTimeout(f"request {job.request_id!r}: its KV was not here within the pull's deadline")
