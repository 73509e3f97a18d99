"""Keep the embeddings of images for the workers that run their prompts.

Embeddings stay for later requests until their room is needed; the least recently used ones go first. New
embeddings are under a lease, which each manifest renews, and stay until all manifests are released or the
lease ends. Running pulls over TCP also keep them; with other transports, pullers read the memory themselves
and notice if it was reused.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from baton.addresses import join
from baton.block_log import Change
from baton.handoff import transports
from baton.handoff.config import MIB, HandoffConfig
from baton.handoff.embeddings import RECORD_BYTES, Embeddings, records_for
from baton.handoff.errors import StagingFull
from baton.handoff.manifest import seal
from baton.handoff.memory import segments
from baton.handoff.memory.arena import Arena
from baton.handoff.records import Bytes
from baton.handoff.reports import Staged
from baton.handoff.save import sizing
from baton.handoff.save.saver import shard_of
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Entry, Staging
from baton.prefix_keys import image_key
from baton.protos.handoff_pb2 import EmbeddingManifest

logger = logging.getLogger(__name__)


@dataclass
class _Kept:
    entry: Entry
    manifest: EmbeddingManifest
    leased_until: float  # time.monotonic
    leases: int = 1  # manifests that have not been released
    new: bool = True  # the first lease is for a manifest that nobody has yet

    def may_go(self, now: float) -> bool:
        return (not self.leases or self.leased_until <= now) and not self.entry.readers


class Shelf:
    """The embeddings of one encode worker. Call `put` on the engine's thread; all else is thread-safe."""

    def __init__(self, config: HandoffConfig, compatibility_hash: str) -> None:
        """Start to serve. Raises HandoffError if the service cannot listen."""
        self.row_bytes = 0  # bytes of one embedding; set once known
        self._config = config
        self._hash = compatibility_hash
        self._transports = transports.create(config.transports)
        segments.remove_stale()
        size = sizing.embeddings_bytes()
        logger.info("%d MiB of shared memory for embeddings of images", size // MIB)
        register = functools.partial(transports.register, self._transports)
        self._staging = Staging(
            Arena(size, RECORD_BYTES, pin=register),
            threading.TIMEOUT_MAX,  # the shelf has its own leases
            functools.partial(transports.withdraw, self._transports),
        )
        self._service = HandoffService(
            self._staging, 0, join(config.host, config.port_of(0)), config.chunk_bytes, config.published_host
        )
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # keyed by identifier, least recently used first
        self._touched: dict[str, None] = {}  # what came or went since `take_changes`
        self._epoch = 0
        self._lock = threading.Lock()  # guards _kept and _touched; taken before staging's

    def put(self, identifier: str, embeddings: Embeddings) -> None:
        """Keep an image's embeddings, unless they are here already. Raises StagingFull."""
        if self._find(identifier, embeddings.rows) is not None:
            return
        self._epoch += 1
        entry = self._reserve(identifier, records_for(embeddings.data.nbytes))

        def write(records: Bytes, first: int) -> None:
            flat, data = records.reshape(-1), embeddings.data[first * RECORD_BYTES :]
            flat[: len(data)] = data[: len(flat)]
            flat[len(data) :] = 0

        self._staging.fill(entry, self._config.chunk_bytes, write)
        self._staging.publish(entry)
        shard = shard_of(self._staging, self._transports, entry, 0, self._config.chunk_bytes)
        shard.address = self._service.address
        manifest = EmbeddingManifest(
            identifier=identifier,
            worker_id=self._config.worker_id,
            compatibility_hash=self._hash,
            rows=embeddings.rows,
            width=embeddings.width,
            dtype=embeddings.dtype,
            epoch=entry.epoch,
            num_records=entry.num_blocks,
            shard=shard,
            lease_s=self._config.lease_s,
        )
        with self._lock:
            if (older := self._kept.pop(identifier, None)) is not None:
                self._staging.release(*older.entry.key)
            self._kept[identifier] = _Kept(entry, seal(manifest), self._lease_end())
            self._touched[identifier] = None

    def manifest(self, identifier: str, rows: int) -> EmbeddingManifest | None:
        """Return the manifest of an image's embeddings and start their lease; None if they are not here."""
        with self._lock:
            kept = self._find(identifier, rows)
            if kept is None:
                return None
            self._kept.move_to_end(identifier)
            kept.leases += not kept.new
            kept.new = False
            kept.leased_until = self._lease_end()
            return kept.manifest

    def release(self, manifest: EmbeddingManifest) -> None:
        with self._lock:
            kept = self._kept.get(manifest.identifier)
            if kept is not None and kept.manifest.epoch == manifest.epoch:
                kept.leases = max(0, kept.leases - 1)

    def has_room(self, rows: int) -> bool:
        """Return whether an image of `rows` embeddings fits now, if necessary in place of others."""
        with self._lock:
            return self._room(records_for(rows * self.row_bytes))

    def take_changes(self) -> Change | None:
        """Return what came and went since the last call, by the scheduler's keys; None: nothing."""
        if not self._touched:
            return None
        with self._lock:
            touched, self._touched = self._touched, {}
            return Change(
                removed=[image_key(one) for one in touched if one not in self._kept],
                stored=[image_key(one) for one in touched if one in self._kept],
            )

    def staged(self) -> Staged:
        now = time.monotonic()
        with self._lock:
            leased = [one.entry for one in self._kept.values() if not one.may_go(now)]
        size = sum(one.slots * RECORD_BYTES for one in leased)
        return Staged(len(leased), size, self._staging.capacity_bytes)

    def size(self) -> tuple[int, int, int]:
        """Return the number of images, their bytes, and the capacity in bytes."""
        with self._lock:
            slots = sum(one.entry.slots for one in self._kept.values())
            return len(self._kept), slots * RECORD_BYTES, self._staging.capacity_bytes

    def close(self) -> None:
        """Stop serving and remove the shared memory. Idempotent."""
        self._service.close()
        self._staging.close()
        transports.close(self._transports)

    def _lease_end(self) -> float:
        return time.monotonic() + self._config.lease_s

    def _find(self, identifier: str, rows: int) -> _Kept | None:
        kept = self._kept.get(identifier)
        if kept is None or kept.manifest.rows != rows or kept.entry.ended:
            return None
        return kept

    def _room(self, records: int) -> bool:
        free, now = self._staging.free_blocks, time.monotonic()
        for one in self._kept.values():
            if free >= records:
                break
            free += one.entry.slots if one.may_go(now) else 0
        return free >= records

    def _reserve(self, identifier: str, records: int) -> Entry:
        with self._lock:
            if self._room(records):
                while True:
                    try:
                        return self._staging.reserve(identifier, self._epoch, records)
                    except StagingFull:
                        if not self._drop_one():
                            break
        raise StagingFull(
            f"no room for the embeddings of image {identifier}: {records * RECORD_BYTES} bytes are needed, of"
            f" {self._staging.capacity_bytes}; add encode workers"
        )

    def _drop_one(self) -> bool:
        now = time.monotonic()
        oldest = next((name for name, one in self._kept.items() if one.may_go(now)), None)
        if oldest is None:
            return False
        self._staging.release(*self._kept.pop(oldest).entry.key)
        self._touched[oldest] = None
        return True
