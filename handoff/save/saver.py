"""Save a rank's blocks into staging.

A prompt computed in several steps is saved step by step into one entry, and can be pulled in the meantime. If
the entry has a slot for each record, a step's records are copied at its end; with a window, they go through
the backlog (backlog.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.handoff import transports
from baton.handoff.errors import HandoffError
from baton.handoff.groups import Part, parts_from
from baton.handoff.memory.cache import BlockCache
from baton.handoff.reports import Key, Problem, ShardSave
from baton.handoff.save.backlog import Backlog
from baton.handoff.save.staging import Entry, Staging
from baton.handoff.transports.base import SavedShard, Transport
from baton.protos.handoff_pb2 import Shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveJob:
    request_id: str
    epoch: int
    parts: tuple[Part, ...]
    whole: int | None = None  # total records, if the prompt takes several steps
    last: bool = True  # whether these are the last records
    slots: int | None = None  # size of the window; default: one slot per record

    @property
    def key(self) -> Key:
        return self.request_id, self.epoch

    @property
    def num_records(self) -> int:
        return sum(len(part.block_ids) for part in self.parts) if self.whole is None else self.whole


@dataclass(frozen=True)
class _Growing:
    """The save of a prompt still being computed."""

    entry: Entry | None = None
    shard: bytes = b""  # serialized handoff.Shard
    problem: Problem | None = None


class Saver:
    """A rank's saves. Called on the engine's thread."""

    def __init__(
        self,
        cache: BlockCache,
        staging: Staging,
        offering: Sequence[Transport],
        *,
        rank: int,
        address: str,
        chunk_bytes: int,
    ) -> None:
        """address: host:port of this rank's Handoff service; chunk_bytes: see `shard_of`."""
        self._cache = cache
        self._staging = staging
        self._transports = offering
        self._rank = rank
        self._address = address
        self._chunk_bytes = chunk_bytes
        self._growing: dict[Key, _Growing] = {}
        self.backlog = Backlog(cache, staging)

    def save(self, job: SaveJob) -> ShardSave | None:
        """Save the job's blocks after the step that wrote them, except those already saved.

        On return the engine may reuse the blocks, unless the save has a window (see Backlog). Returns a
        report for the first and the last part. A failure is reported with the last part and never raised.
        """
        start = time.monotonic()
        before = self._growing.pop(job.key, None)
        now = self._grow(job, before or _Growing())
        if not job.last:
            self._growing[job.key] = now
            if before is not None or now.problem is not None:
                return None
        end = time.monotonic()
        return ShardSave(
            job.request_id,
            job.epoch,
            self._rank,
            shard=now.shard,
            saved_at_s=end,
            save_ms=(end - start) * 1e3,
            problem=now.problem,
            begun=not job.last,
        )

    def drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if self._growing.pop(key, None) is not None:
                self._staging.release(*key)

    def withhold(self, keys: Iterable[Key]) -> None:
        """Stop reading preempted requests' blocks; release complete prompts' saves: they never finish."""
        keys = list(keys)
        self.backlog.withhold(keys)
        for key in keys:
            if key not in self._growing:
                self._staging.release(*key)

    def _grow(self, job: SaveJob, before: _Growing) -> _Growing:
        if before.problem is not None:
            return before
        try:
            entry = self._stage(job, before.entry)
        except HandoffError as error:
            self._staging.release(*job.key)
            return _Growing(problem=Problem.of(error))
        return _Growing(entry, before.shard or self._offered(entry))

    def _stage(self, job: SaveJob, entry: Entry | None) -> Entry:
        """Write the job's records, into a new entry if needed. Copies may still be under way on return."""
        if entry is not None:
            self._fill(job, entry)
        else:
            entry = self._staging.reserve(job.request_id, job.epoch, job.num_records, job.slots)
            try:
                if not entry.windowed:
                    self._fill(job, entry)
            except BaseException:
                self._staging.discard(entry)
                raise
            self._staging.publish(entry, growing=not job.last)
            if entry.windowed:
                self._fill(job, entry)
        if job.last:
            self._staging.grown(entry)
        return entry

    def _fill(self, job: SaveJob, entry: Entry) -> None:
        parts = parts_from(job.parts, self.backlog.reached(entry))
        if not parts:
            self._staging.check(entry)
        elif entry.windowed:
            self.backlog.add(entry, parts, self._cache.mark())
        else:
            self._cache.fill(parts, self._staging.filling(entry, parts[0].first, parts[-1].stop))

    def _offered(self, entry: Entry) -> bytes:
        shard = shard_of(self._staging, self._transports, entry, self._rank, self._chunk_bytes)
        shard.address = self._address
        if self._cache.form.stages:
            shard.layers.extend(self._cache.form.layers_of(self._rank, 0))
        return shard.SerializeToString()

    def close(self) -> None:
        self.backlog.close()


def shard_of(
    staging: Staging, offering: Sequence[Transport], entry: Entry, rank: int, chunk_bytes: int
) -> Shard:
    """Describe a published entry, with the transports' offers. chunk_bytes: maximum read at once."""
    saved = SavedShard(
        request_id=entry.request_id,
        epoch=entry.epoch,
        rank=rank,
        num_blocks=entry.num_blocks,
        slots=entry.slots,
        ticket=staging.tickets.of(*entry.key),
        place=entry.place,
        read=lambda: staging.read(*entry.key, None, chunk_bytes),
    )
    shard = Shard(
        rank=rank,
        record_bytes=entry.record_bytes,
        ticket=saved.ticket,
        slots=entry.slots if entry.windowed else 0,
    )
    for transport in offering:
        if entry.windowed and not transport.windows:
            continue
        try:
            offer = transport.offer(saved)
        except Exception:  # a bug in another package must not affect the other transports
            logger.exception(
                "transport %r failed to offer request %r",
                transport.name,
                saved.request_id,
                extra={"request_id": saved.request_id},
            )
            continue
        if offer is not None:
            shard.offers[transport.name] = offer
    # the entry may have ended before all transports had made their offers
    if staging.renew([entry.key]):
        transports.withdraw(offering, *entry.key)
    return shard
