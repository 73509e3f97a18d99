"""The interface of a transport: it brings records from where they were saved into a puller's process.

docs/extending.md is the page for authors.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from baton.handoff import windows
from baton.handoff.errors import PullCancelled, PullTimeout
from baton.handoff.memory.arena import StagingSlots
from baton.handoff.records import Bytes, Records
from baton.protos.handoff_pb2 import Shard

if TYPE_CHECKING:  # it imports torch
    from baton.handoff.memory.streams import Device


class Cancellation:
    """Signal, once and from any thread, that a blocked pull should stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._set = False

    @property
    def is_set(self) -> bool:
        """Whether the pull was cancelled."""
        return self._set

    def set(self) -> None:
        """Cancel the pull: run the callbacks, each once."""
        with self._lock:
            self._set = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def call(self, callback: Callable[[], object]) -> None:
        """Run `callback` when the pull is cancelled, or at once if it already is."""
        with self._lock:
            if not self._set:
                self._callbacks.append(callback)
                return
        callback()


@dataclass(frozen=True)
class SavedShard:
    """Describe one rank's save under its lease: what a transport can offer to pullers."""

    request_id: str
    epoch: int
    rank: int
    num_blocks: int
    slots: int  # fewer than blocks only for transports with `windows`
    # A transport with its own server compares this with `Pull.shard.ticket`.
    ticket: bytes
    # In this host's shared memory; reused when the lease has ended, even while somebody reads it.
    place: StagingSlots
    read: Callable[[], Iterator[Records]]  # all records in order, as they arrive; raises SourceError

    @property
    def record_bytes(self) -> int:
        """Bytes of one block's record."""
        return self.place.record_bytes


@dataclass(frozen=True)
class Pull:
    """Order `num_blocks` records of a shard from `first_block` on, for one rank."""

    request_id: str
    epoch: int
    shard: Shard
    saved_blocks: int  # total of the shard
    first_block: int
    num_blocks: int
    deadline: float  # CLOCK_MONOTONIC, seconds
    chunk_bytes: int  # maximum moved at once, as far as whole records allow
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def what(self) -> str:
        """The pulled KV and where it lies, for error texts."""
        shard = self.shard
        return f"KV of request {self.request_id!r}, epoch {self.epoch}, rank {shard.rank} at {shard.address}"

    @property
    def record_bytes(self) -> int:
        """Bytes of one block's record."""
        return self.shard.record_bytes

    @property
    def slots(self) -> int:
        """The shard's slots: one for each of the saved records, or fewer."""
        return self.shard.slots or self.saved_blocks

    @property
    def records_a_chunk(self) -> int:
        """Whole records that fit into a chunk, at least one, and at most one part of a window."""
        return windows.at_once(self.chunk_bytes // self.record_bytes, self.slots, self.saved_blocks)

    def check_time(self) -> None:
        """Raise PullCancelled or PullTimeout when the pull must end now."""
        if self.cancellation.is_set:
            raise PullCancelled(f"{self.what}: the request was aborted while it was pulled")
        if time.monotonic() >= self.deadline:
            raise PullTimeout(f"{self.what}: not here within the pull's deadline")


class Transport(ABC):
    """Implement both ends of one way to move records: one object per rank, called from several threads.

    The saving rank `offer`s each save; the offers of all its transports travel in `Shard.offers`, by name.
    The pulling rank takes the first of its own transports that `reaches` the shard, and `pull`s.
    """

    name: ClassVar[str]  # the name under which it is registered
    # Whether it moves saves with fewer slots than records: record r lies in slot r % slots, and arrives there
    # only after the consumer of `pull` has had record r - slots. Others are not asked to offer such a save.
    windows: ClassVar[bool] = False

    @classmethod
    def hindrance(cls) -> str:
        """Return why it cannot be used in this process, and what to do about that; empty if it can."""
        return ""

    @classmethod
    def needless(cls) -> str:
        """Return why it is used here only if named, though it would work; empty if it pays."""
        return ""

    def register(self, memory: Bytes) -> None:  # noqa: B027 (most need not know)
        """Take note of a page-aligned piece of staging's memory, before any save lies in it.

        No record spans two pieces; the first piece holds all headers. They stay mapped for as long as this
        object refers to them.
        """

    @abstractmethod
    def offer(self, saved: SavedShard) -> bytes | None:
        """Return what a puller needs to find this save, in the transport's own format; None: no offer.

        Called on the engine's thread, which waits. Records may still be arriving, so copy on a thread of your
        own.
        """

    def withdraw(self, request_id: str, epoch: int) -> None:  # noqa: B027 (most keep nothing of their own)
        """Drop what `offer` keeps: the lease ended, by a release or unpulled. Called for each save.

        A lease that ends while the save is offered is withdrawn twice: ignore unknown saves.
        """

    def reads_for(self, device: Device) -> None:  # noqa: B027 (most bring records in memory of their own)
        """Take note of the device to which pulled records go: it copies memory pinned for it by itself."""

    @abstractmethod
    def reaches(self, shard: Shard) -> bool:
        """Return whether the shard's offer is within reach of this process. Does not connect."""

    @abstractmethod
    def pull(self, pull: Pull) -> Iterator[Records]:
        """Yield the wanted records in order, with the digests that were saved with them.

        The consumer copies a chunk out before it asks for the next one. When asked for the next (or for the
        end), the transport makes sure that the memory it lent was not changed meanwhile. Calls
        `pull.check_time` between chunks. Raises TransportError, SourceError or a subclass.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Close connections, mappings and threads. Idempotent."""
