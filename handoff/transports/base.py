"""The interface of a transport: it brings records from where they were saved into a puller's process.

docs/extending.md is the page for authors of one.
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
    """A flag that any thread sets once; it stops a pull that is blocked."""

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
        """Run `callback` when the pull is cancelled; at once if it is."""
        with self._lock:
            if not self._set:
                self._callbacks.append(callback)
                return
        callback()


@dataclass(frozen=True)
class SavedShard:
    """One rank's save under its lease: what a transport can offer to pullers."""

    request_id: str
    epoch: int
    rank: int
    num_blocks: int
    slots: int  # fewer than blocks only for transports with `windows`
    ticket: bytes  # which `Pull.shard.ticket` has to be: a transport with a server of its own compares them
    place: StagingSlots  # in this host's shared memory; reused when the lease has ended, whoever looks at it
    read: Callable[[], Iterator[Records]]  # all records in order, as they arrive; raises SourceError

    @property
    def record_bytes(self) -> int:
        """Bytes of one block's record."""
        return self.place.record_bytes


@dataclass(frozen=True)
class Pull:
    """One rank's order: `num_blocks` records of its shard from `first_block` on."""

    request_id: str
    epoch: int
    shard: Shard
    saved_blocks: int  # all that the shard has
    first_block: int
    num_blocks: int
    deadline: float  # CLOCK_MONOTONIC, seconds
    chunk_bytes: int  # at once, as far as whole records allow
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def what(self) -> str:
        """The pulled KV and where it lies, for the texts of errors."""
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
        """Whole records that fit into a chunk, one at least, and of a window no more than a part."""
        return windows.at_once(self.chunk_bytes // self.record_bytes, self.slots, self.saved_blocks)

    def check_time(self) -> None:
        """Raise PullCancelled or PullTimeout when the pull is to end now."""
        if self.cancellation.is_set:
            raise PullCancelled(f"{self.what}: the request was aborted while it was pulled")
        if time.monotonic() >= self.deadline:
            raise PullTimeout(f"{self.what}: not here within the pull's deadline")


class Transport(ABC):
    """Both ends of one way to move records: one object for each rank, called from several threads.

    The saving rank `offer`s each save; the offers of all its transports travel in `Shard.offers`, by name.
    The pulling rank takes the first of its own transports that `reaches` the shard, and `pull`s.
    """

    name: ClassVar[str]  # the one under which it is registered
    # Whether it moves saves with fewer slots than records: record r lies in slot r % slots, and comes there
    # only when the consumer of `pull` has had record r - slots. Others are not asked to offer such a save.
    windows: ClassVar[bool] = False

    @classmethod
    def hindrance(cls) -> str:
        """Return why it cannot be used in this process, and what to do about that; empty if it can."""
        return ""

    @classmethod
    def needless(cls) -> str:
        """Return why it is used here only where it is named, though it could be; empty if it pays."""
        return ""

    def register(self, memory: Bytes) -> None:  # noqa: B027 (most need not know)
        """Take note of a piece of staging's memory, whole pages, before any save lies in it.

        No save's record lies in two of them; the first piece holds all headers. They stay mapped for as long
        as this object refers to them.
        """

    @abstractmethod
    def offer(self, saved: SavedShard) -> bytes | None:
        """Return what a puller needs to find this save, in any form of the transport's own; None: no offer.

        Called on the engine's thread, which waits. Records may still be arriving, so copy on a thread of your
        own.
        """

    def withdraw(self, request_id: str, epoch: int) -> None:  # noqa: B027 (most keep nothing of their own)
        """Let go of what `offer` keeps: the lease ended, by a release or unpulled. Called for each save.

        A lease that ends while the save is offered is withdrawn twice: what is not known is ignored.
        """

    def reads_for(self, device: Device) -> None:  # noqa: B027 (most bring records in memory of their own)
        """Take note of the device to which pulled records go: what is pinned for it, it copies by itself."""

    @abstractmethod
    def reaches(self, shard: Shard) -> bool:
        """Return whether the shard's offer is within reach of this process. Does not connect."""

    @abstractmethod
    def pull(self, pull: Pull) -> Iterator[Records]:
        """Yield the wanted records in order, with the digests that were saved with them.

        The consumer copies a chunk out before it asks for the next one. When asked for the next (or for the
        end), the transport makes sure that the memory it lent was not changed meanwhile. Calls
        `pull.check_time` between chunks. Raises TransportError or SourceError, or one of their kinds.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Let go of connections, mappings and threads. Idempotent."""
