"""A rank's saves: whole blocks of every layer into staging, digested on the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.handoff.errors import HandoffError
from baton.handoff.groups import Part
from baton.handoff.memory.cache import BlockCache
from baton.handoff.reports import Problem, ShardSave
from baton.handoff.save.offers import offers
from baton.handoff.save.staging import Entry, Staging
from baton.handoff.transports.base import Transport
from baton.protos.handoff_pb2 import Shard


@dataclass(frozen=True)
class SaveJob:
    """An order to keep these blocks, in this order, for whoever pulls attempt `epoch` at the request."""

    request_id: str
    epoch: int
    parts: tuple[Part, ...]

    @property
    def key(self) -> tuple[str, int]:
        """Request id and epoch."""
        return self.request_id, self.epoch

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return sum(len(part.block_ids) for part in self.parts)


class Saver:
    """The saving end of a rank, called on the engine's thread after the step that wrote the blocks."""

    def __init__(
        self,
        cache: BlockCache,
        staging: Staging,
        transports: Sequence[Transport],
        *,
        rank: int,
        address: str,
        chunk_bytes: int,
    ) -> None:
        """Save to `staging`.

        address: host:port of this rank's Handoff service; chunk_bytes: of records read at once.
        """
        self._cache = cache
        self._staging = staging
        self._transports = transports
        self._rank = rank
        self._address = address
        self._chunk_bytes = chunk_bytes

    def save(self, job: SaveJob) -> ShardSave:
        """Save the job's blocks and offer them over each transport. The engine may reuse them on return.

        Never raises HandoffError: a save that fails is a problem to report, not the end of a step.
        """
        start = time.monotonic()
        try:
            entry = self._stage(job)
        except HandoffError as error:
            return ShardSave(job.request_id, job.epoch, self._rank, problem=Problem.of(error))
        shard = Shard(
            rank=self._rank,
            address=self._address,
            record_bytes=entry.record_bytes,
            offers=offers(self._staging, self._transports, entry, self._rank, self._chunk_bytes),
            ticket=self._staging.tickets.of(*entry.key),
        )
        end = time.monotonic()
        return ShardSave(
            job.request_id,
            job.epoch,
            self._rank,
            shard=shard.SerializeToString(),
            saved_at_s=end,
            save_ms=(end - start) * 1e3,
        )

    def _stage(self, job: SaveJob) -> Entry:
        """Stage and publish: from here on it can be pulled, though the last of it may still be arriving."""
        entry = self._staging.reserve(job.request_id, job.epoch, job.num_blocks)
        try:
            self._cache.fill(job.parts, self._staging.filling(entry))
        except BaseException:
            self._staging.discard(entry)
            raise
        self._staging.publish(entry)
        return entry
