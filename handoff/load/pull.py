"""Pull a save's records from the shards that a rank needs, check them and write them into its cache.

With different numbers of ranks (forms.py), a rank pulls its heads from several shards, one chunk of each in
turn, so that they advance together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from baton.handoff import digests, manifest
from baton.handoff.channels import HandoffClient
from baton.handoff.errors import MalformedManifest, TransportFailed
from baton.handoff.forms import Share
from baton.handoff.groups import Part, runs
from baton.handoff.load.job import LoadJob
from baton.handoff.load.taken import Taken
from baton.handoff.manifest import Puller
from baton.handoff.memory.cache import BlockCache, Landing
from baton.handoff.memory.streams import Mark
from baton.handoff.records import Records
from baton.handoff.reports import Costs, Problem, ShardLoad
from baton.handoff.transports import choose
from baton.handoff.transports.base import Cancellation, Pull, Transport
from baton.protos.handoff_pb2 import Manifest

_ENDED = object()


@dataclass(eq=False)
class Progress:
    """The progress of one pull."""

    job: LoadJob
    cancellation: Cancellation = field(default_factory=Cancellation)
    heard_s: float = 0.0  # time.monotonic of the start, or of the last bytes
    whole_s: float = 0.0  # when the prompt was complete: the times below count from then on
    late: bool = False  # cancelled at its deadline
    taken: list[Taken] = field(default_factory=list)  # one per shard
    transport: str = ""
    bytes: int = 0
    early_bytes: int = 0
    blocks: int = 0
    # seconds
    wait: float = 0.0
    move: float = 0.0
    check: float = 0.0
    load: float = 0.0

    @property
    def told(self) -> bool:
        """Whether the source may have dropped records, so that another pull would fail."""
        return any(one.told for one in self.taken)

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


class Pulls:
    """A rank's pulls. Thread-safe."""

    def __init__(
        self,
        cache: BlockCache,
        puller: Puller,
        transports: list[Transport],
        client: HandoffClient,
        chunk_bytes: int,
    ) -> None:
        """Pull into `cache`. transports: best first; the list may be changed."""
        self._cache = cache
        self._puller = puller
        self._transports = transports
        self._client = client
        self._chunk_bytes = chunk_bytes

    def check(self, job: LoadJob, described: Manifest) -> tuple[Share, ...]:
        """Return this rank's shares of the save. Raises ManifestError."""
        shares = manifest.check(described, job.saved_id, job.epoch, self._puller)
        if described.num_tokens != job.tokens:
            raise MalformedManifest(
                f"request {job.request_id!r}: the manifest of worker {described.worker_id!r} is of"
                f" {described.num_tokens} tokens; {job.tokens} were announced"
            )
        return shares

    def pull(
        self,
        progress: Progress,
        described: Manifest,
        shares: Sequence[Share],
        after: Mark | None,
        deadline: float,
    ) -> None:
        """Pull and load all shares. Raises HandoffError.

        after: engine work that was queued when the blocks were allocated; deadline: CLOCK_MONOTONIC.
        """
        seed = digests.seed(progress.job.saved_id, progress.job.epoch)
        landings: list[Landing] = []
        coming: list[Generator[None]] = []
        try:
            for share in shares:
                pulls = self._orders(progress, described, share, deadline)
                if not pulls:
                    continue
                transport = choose(self._transports, pulls[0].shard)
                progress.transport = transport.name
                pulls[0].check_time()
                landing = self._cache.landing(pulls[0].what, seed, after, share)
                landings.append(landing)
                reader = self._puller.rank, share.readers
                taken = Taken(self._client, pulls[0], progress.cancellation.set, reader)
                progress.taken.append(taken)
                coming.append(_land(progress, landing, taken, transport, pulls))
            while coming:
                coming = [each for each in coming if next(each, _ENDED) is not _ENDED]
                if not progress.whole_s:  # the prompt's own steps hide all times so far
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

    def release(self, job: LoadJob, described: Manifest, shares: Sequence[Share], *, failed: bool) -> None:
        """Release this rank's shares, or all shards after a failure; never another attempt's save."""
        if not manifest.is_of(described, job.saved_id, job.epoch):
            return
        if failed:
            self._client.release_soon(described)
            return
        for share in shares:
            shard, reader = described.shards[share.rank], (self._puller.rank, share.readers)
            self._client.release_soon(described, confirmed=True, shards=[shard], reader=reader)

    def _orders(self, progress: Progress, described: Manifest, share: Share, deadline: float) -> list[Pull]:
        """Return one order per run of records.

        Usually there is one run; with several groups, a cached prefix leaves a run per group.
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
        """Return the parts of the groups that this share has heads of."""
        groups = {self._puller.layers[cut.layer].group for cut in share.cuts}
        return [part for part in job.parts if part.group in groups]


def _land(
    progress: Progress, landing: Landing, taken: Taken, transport: Transport, pulls: Sequence[Pull]
) -> Generator[None]:
    """Pull and load one share, a chunk per `next`. Raises TransportFailed if too few records arrive."""
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
                progress.move += time.monotonic() - max(start, progress.whole_s)
                if taken.is_due(stop):  # the transport verified these when the next chunk was requested
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
    """Make any transport's iterator closable."""
    yield from transport.pull(pull)
