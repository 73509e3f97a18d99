"""A rank's saves: whole blocks of every layer into staging, digested on the way."""

from __future__ import annotations

import time
from dataclasses import dataclass

from baton.handoff.errors import HandoffError
from baton.handoff.memory.cache import BlockCache
from baton.handoff.memory.views import joined
from baton.handoff.reports import Problem, ShardSave
from baton.handoff.save.staging import Entry, Staging
from baton.protos.handoff_pb2 import Run, Shard


@dataclass(frozen=True)
class SaveJob:
    """Keep these blocks, in this order, for whoever pulls attempt `epoch` at the request."""

    request_id: str
    epoch: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """Where this rank's shards are to be found."""

    rank: int
    address: str
    host: str
    shares_memory: bool  # whether the segment's name is given away


class Saver:
    """Called on the engine's thread, after the step that wrote the blocks: they may be reused on return."""

    def __init__(self, cache: BlockCache, staging: Staging, origin: Origin) -> None:
        self._cache = cache
        self._staging = staging
        self._origin = origin

    def save(self, job: SaveJob) -> ShardSave:
        """Never raises HandoffError: a save that fails is a problem to report, not the end of a step."""
        start = time.monotonic()
        try:
            entry = self._stage(job)
        except HandoffError as error:
            return ShardSave(job.request_id, job.epoch, self._origin.rank, problem=Problem.of(error))
        end = time.monotonic()
        shard = Shard(
            rank=self._origin.rank,
            address=self._origin.address,
            host=self._origin.host,
            segment=entry.place.segment if self._origin.shares_memory else "",
            offset=entry.place.offset,
            record_bytes=entry.record_bytes,
            runs=[Run(first=first, count=count) for first, count in joined(entry.place.runs)],
        )
        return ShardSave(
            job.request_id,
            job.epoch,
            self._origin.rank,
            shard=shard.SerializeToString(),
            saved_at_s=end,
            save_ms=(end - start) * 1e3,
        )

    def _stage(self, job: SaveJob) -> Entry:
        """From here on it can be pulled, though the last of it may still be on its way from the device."""
        entry = self._staging.reserve(job.request_id, job.epoch, len(job.block_ids))
        try:
            self._cache.fill(job.block_ids, self._staging.filling(entry))
        except BaseException:
            self._staging.discard(entry)
            raise
        self._staging.publish(entry)
        return entry
