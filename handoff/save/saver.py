"""A rank's saves: whole blocks of every layer into staging, digested on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.handoff import transports
from baton.handoff.errors import HandoffError
from baton.handoff.memory.cache import BlockCache
from baton.handoff.reports import Problem, ShardSave
from baton.handoff.save.staging import Entry, Staging
from baton.handoff.transports.base import SavedShard, Transport
from baton.protos.handoff_pb2 import Shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveJob:
    """An order to keep these blocks, in this order, for whoever pulls attempt `epoch` at the request."""

    request_id: str
    epoch: int
    block_ids: tuple[int, ...]


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
            offers=self._offers(entry),
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
        entry = self._staging.reserve(job.request_id, job.epoch, len(job.block_ids))
        try:
            self._cache.fill(job.block_ids, self._staging.filling(entry))
        except BaseException:
            self._staging.discard(entry)
            raise
        self._staging.publish(entry)
        return entry

    def _offers(self, entry: Entry) -> dict[str, bytes]:
        """Ask each transport what it offers of this save, by name."""
        saved = SavedShard(
            request_id=entry.request_id,
            epoch=entry.epoch,
            rank=self._rank,
            num_blocks=entry.num_blocks,
            ticket=self._staging.tickets.of(*entry.key),
            place=entry.place,
            read=lambda: self._staging.read(*entry.key, None, self._chunk_bytes),
        )
        offers = {}
        for transport in self._transports:
            try:
                offer = transport.offer(saved)
            except Exception:  # another package's: the other transports carry the KV all the same
                logger.exception(
                    "transport %r offers nothing of request %r", transport.name, saved.request_id
                )
                continue
            if offer is not None:
                offers[transport.name] = offer
        if self._staging.renew([entry.key]):  # gone before all had offered: they would never hear of its end
            transports.withdraw(self._transports, *entry.key)
        return offers
