"""Pull a save's records from the shards that a rank needs, check them and write them into its cache.

A pull runs on a thread of loader.py, which decides when and for how long; a transport moves the bytes.

With different numbers of ranks (forms.py), a rank pulls its heads from several shards, one chunk of each in
turn, so that they advance together. The records of a windowed save are acknowledged, so that the source can
reuse their slots.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.handoff import digests, manifest, windows
from baton.handoff.channels import HandoffClient
from baton.handoff.errors import ERROR_KEY, HandoffError, MalformedManifest, TransportFailed, named
from baton.handoff.forms import Share
from baton.handoff.groups import Part, runs
from baton.handoff.manifest import Puller
from baton.handoff.memory.cache import BlockCache, Landing
from baton.handoff.memory.streams import Mark
from baton.handoff.records import Records
from baton.handoff.reports import Costs, Key, Problem, ShardLoad
from baton.handoff.transports import choose
from baton.handoff.transports.base import Cancellation, Pull, Transport
from baton.protos.handoff_pb2 import Manifest, TakenRequest
from baton.rpc import CALL_TIMEOUT_S

_ENDED = object()


@dataclass(frozen=True)
class LoadJob:
    """Load a save into these cache blocks, once its manifest has arrived."""

    request_id: str
    epoch: int
    tokens: int  # must equal the manifest's
    parts: tuple[Part, ...]
    waited_s: float = 0.0  # since its arrival, or the prompt's end; a duration, because clocks may differ
    saved_as: str = ""  # request id at the source, if different
    manifest: Manifest | None = None  # set if it came before the blocks were allocated
    complete: bool = False  # the prompt is complete: the request waits only for its KV

    @property
    def saved_id(self) -> str:
        return self.saved_as or self.request_id

    @property
    def key(self) -> Key:
        return self.request_id, self.epoch


@dataclass(eq=False)
class Progress:
    job: LoadJob
    cancellation: Cancellation = field(default_factory=Cancellation)
    heard_s: float = 0.0  # time.monotonic of the start, or of the last bytes
    whole_s: float = 0.0  # when the prompt was complete: the times below start then
    acks: list[Acknowledgements] = field(default_factory=list)  # one per shard
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
    def dropped(self) -> bool:
        """Whether the source may have dropped records, so that another pull would fail."""
        return any(one.dropped for one in self.acks)

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


class Acknowledgements:
    """The acknowledgements of one pull. Without a window there are none."""

    def __init__(
        self,
        client: HandoffClient,
        pull: Pull,
        failed: Callable[[], object],
        reader: tuple[int, int] = (0, 1),
    ) -> None:
        """failed: called, on any thread, when a call fails; reader: this rank, and how many ranks pull."""
        self._reader = reader
        self._client = client
        self._pull = pull
        self._failed = failed
        windowed = pull.slots < pull.saved_blocks
        self._step = windows.part(pull.slots) if windowed else pull.saved_blocks + 1
        self._told = 0
        self._wanted = 0
        self._calling = False
        self._ended = False
        self._lock = threading.Lock()
        self.error: HandoffError | None = None

    @property
    def dropped(self) -> bool:
        return bool(self._told or self._wanted)

    def is_due(self, place: int) -> bool:
        """Return whether to acknowledge the records before this place now."""
        return place - max(self._told, self._wanted) >= self._step

    def acknowledge(self, place: int) -> None:
        """Acknowledge, without waiting, all records before this position."""
        self._told = place
        self._soon()

    def skip(self, place: int) -> None:
        """Tell the source, without waiting, to skip the records before this place."""
        self._wanted = place
        self._soon()

    def end(self) -> None:
        """Ignore later failures of calls, because everything has arrived. Raises an earlier failure."""
        with self._lock:
            self._ended = True
        if self.error is not None:
            raise self.error

    def _soon(self) -> None:
        with self._lock:
            if self._calling:
                return
            self._calling = True
        self._call()

    def _call(self) -> None:
        pull, told = self._pull, (self._told, self._wanted)
        request = TakenRequest(
            request_id=pull.request_id,
            epoch=pull.epoch,
            ticket=pull.shard.ticket,
            taken=told[0],
            wanted=told[1],
            reader=self._reader[0],
            readers=self._reader[1],
        )
        call = self._client.call("Taken", pull.shard.address, request, CALL_TIMEOUT_S)
        call.add_done_callback(lambda done: self._on_done(done, told))

    def _on_done(self, call: Any, told: tuple[int, int]) -> None:
        try:
            call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            with self._lock:
                if self._ended:
                    return
                self.error = self._translated(error)
            self._failed()
            return
        with self._lock:
            self._calling = (self._told, self._wanted) != told and not self._ended
            if not self._calling:
                return
        self._call()

    def _translated(self, error: Any) -> HandoffError:
        what = f"{self._pull.what}: the acknowledgement failed"
        if not isinstance(error, grpc.RpcError):
            return TransportFailed(f"{what}: the connection was closed")
        failed: Any = error
        for key, value in failed.trailing_metadata() or ():
            if key == ERROR_KEY:
                return named(value)(failed.details())
        return TransportFailed(f"{what}: {failed.code().name}: {failed.details()}")


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
        self, progress: Progress, described: Manifest, shares: Sequence[Share], after: Mark | None
    ) -> None:
        """Pull and load all shares, `after` the engine's work so far. Raises HandoffError."""
        seed = digests.seed(progress.job.saved_id, progress.job.epoch)
        landings: list[Landing] = []
        coming: list[Generator[None]] = []
        try:
            for share in shares:
                pulls = self._orders(progress, described, share)
                if not pulls:
                    continue
                transport = choose(self._transports, pulls[0].shard)
                progress.transport = transport.name
                pulls[0].check_time()
                landing = self._cache.landing(pulls[0].what, seed, after, share)
                landings.append(landing)
                reader = self._puller.rank, share.readers
                acks = Acknowledgements(self._client, pulls[0], progress.cancellation.set, reader)
                progress.acks.append(acks)
                coming.append(_land(progress, landing, acks, transport, pulls))
            while coming:
                coming = [each for each in coming if next(each, _ENDED) is not _ENDED]
                if not progress.whole_s:  # the prompt's own steps hide all times so far
                    progress.early_bytes = progress.bytes
                    progress.move = 0.0
                    progress.check = -sum(each.check_s for each in landings)
                    progress.load = -sum(each.load_s for each in landings)
            for landing in landings:
                landing.finish()
            for acks in progress.acks:
                acks.end()
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

    def _orders(self, progress: Progress, described: Manifest, share: Share) -> list[Pull]:
        """Return an order per run of records; with several groups, a cached prefix leaves one per group."""
        job = progress.job
        pulls = []
        groups = {self._puller.layers[cut.layer].group for cut in share.cuts}
        for first, stop in runs([part for part in job.parts if part.group in groups]):
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
                    chunk_bytes=self._chunk_bytes,
                    cancellation=progress.cancellation,
                )
            )
        return pulls


def _land(
    progress: Progress, landing: Landing, acks: Acknowledgements, transport: Transport, pulls: Sequence[Pull]
) -> Generator[None]:
    """Pull and load one share, a chunk per `next`. Raises TransportFailed if too few records arrive."""
    blocks = 0
    for pull in pulls:
        if acks.is_due(pull.first_block):
            landing.finish()
            acks.skip(pull.first_block)
        stop = pull.first_block
        with contextlib.closing(_chunks(transport, pull)) as chunks:
            while True:
                start = time.monotonic()
                records = next(chunks, None)
                progress.move += time.monotonic() - max(start, progress.whole_s)
                if acks.is_due(stop):  # the transport verified these when the next chunk was requested
                    landing.finish()
                    acks.acknowledge(stop)
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
