"""The interface of transports, which bring saved records into a puller's process.

docs/extending.md is the guide for authors of transports.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from baton.handoff import windows
from baton.handoff.errors import PullCancelled, PullTimeout
from baton.handoff.records import Bytes, Records
from baton.protos.handoff_pb2 import Shard

if TYPE_CHECKING:  # these import torch
    from baton.handoff.memory.arena import StagingSlots
    from baton.handoff.memory.streams import Device


@dataclass(eq=False)
class Cancellation:
    """A pull's cancellation and deadline. Any thread may set either while the pull runs."""

    deadline: float = math.inf  # CLOCK_MONOTONIC, seconds
    is_set: bool = False

    def set(self) -> None:
        self.is_set = True


@dataclass(frozen=True)
class SavedShard:
    """One rank's save, for a transport to offer."""

    request_id: str
    epoch: int
    rank: int
    num_blocks: int
    slots: int  # fewer than blocks only for transports with `windows`
    ticket: bytes  # a transport with its own server must compare it with `Pull.shard.ticket`
    place: StagingSlots  # in shared memory; reused when the lease has expired, even during a read
    read: Callable[[], Iterator[Records]]  # all records in order, as they arrive; raises SourceError

    @property
    def record_bytes(self) -> int:
        return self.place.record_bytes


@dataclass(frozen=True)
class Pull:
    """The order for one pull, of `num_blocks` records from `first_block` on."""

    request_id: str
    epoch: int
    shard: Shard
    saved_blocks: int  # total of the shard
    first_block: int
    num_blocks: int
    chunk_bytes: int  # maximum moved at a time, but at least a record
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def what(self) -> str:
        shard = self.shard
        return f"KV of request {self.request_id!r}, epoch {self.epoch}, rank {shard.rank} at {shard.address}"

    @property
    def record_bytes(self) -> int:
        return self.shard.record_bytes

    @property
    def slots(self) -> int:
        return self.shard.slots or self.saved_blocks

    @property
    def records_a_chunk(self) -> int:
        return windows.at_once(self.chunk_bytes // self.record_bytes, self.slots, self.saved_blocks)

    def check_time(self) -> None:
        """Raise PullCancelled or PullTimeout if the pull must end."""
        if self.cancellation.is_set:
            raise PullCancelled(f"{self.what}: the request was aborted while it was pulled")
        if time.monotonic() >= self.cancellation.deadline:
            raise PullTimeout(f"{self.what}: it did not arrive before the pull's deadline")


class Transport(ABC):
    """Both ends of one way to move records. Each rank has one object; several threads call it.

    The saving rank `offer`s each save; the manifest contains the offers of all its transports in
    `Shard.offers`, by name. The pulling rank `pull`s with the first of its transports that `reaches` the
    shard.
    """

    name: ClassVar[str]  # as registered
    # Whether it can move saves with fewer slots than records: record r is in slot r % slots, and arrives
    # there only after the consumer of `pull` has taken record r - slots. Other transports are not asked to
    # offer such saves.
    windows: ClassVar[bool] = False

    @classmethod
    def hindrance(cls) -> str:
        """Return why the transport does not work in this process, and the cure; empty if it works."""
        return ""

    @classmethod
    def needless(cls) -> str:
        """Return why a transport that works here is not used by default; empty if it is used."""
        return ""

    def register(self, memory: Bytes) -> None:  # noqa: B027 (optional)
        """Prepare a page-aligned piece of staging's memory, before it is used.

        No record spans two pieces; the first piece holds all headers. A piece stays mapped for as long as
        this object refers to it.
        """

    @abstractmethod
    def offer(self, saved: SavedShard) -> bytes | None:
        """Return what a puller needs to find this save, in the transport's own format; None: no offer.

        The engine's thread calls this and waits. Records may still be arriving, so read them on another
        thread.
        """

    def withdraw(self, request_id: str, epoch: int) -> None:  # noqa: B027 (optional)
        """Drop what `offer` stored: the save was released, or its lease expired. Ignore unknown saves.

        Called once per save, or twice if the lease ends during the offer.
        """

    def reads_for(self, device: Device) -> None:  # noqa: B027 (optional)
        """Prepare for copies to this device, which are faster from memory that is pinned for it."""

    @abstractmethod
    def reaches(self, shard: Shard) -> bool:
        """Return whether this process can use the shard's offer. Does not connect."""

    @abstractmethod
    def pull(self, pull: Pull) -> Iterator[Records]:
        """Yield the records in order, with their saved digests.

        The consumer copies each chunk before it requests the next one (or the end). The transport then
        verifies that the chunk's memory did not change in the meantime. Call `pull.check_time` between chunks
        and while waiting. Raises TransportError or SourceError.
        """

    def close(self) -> None:  # noqa: B027 (optional)
        """Close connections, mappings and threads. Idempotent."""
