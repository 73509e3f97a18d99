"""What a transport is: it brings records from where a shard lies into this process' reach."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from baton.handoff.digests import Digests
from baton.handoff.errors import PullCancelled, PullTimeout
from baton.handoff.memory.segments import Bytes
from baton.protos.handoff_pb2 import Shard


class Cancellation:
    """Set once, from any thread; tells whoever is blocked in a pull."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._set = False

    @property
    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._lock:
            self._set = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def call(self, callback: Callable[[], object]) -> None:
        """Run `callback` when set; at once if it is."""
        with self._lock:
            if not self._set:
                self._callbacks.append(callback)
                return
        callback()


@dataclass(frozen=True)
class Pull:
    """One rank's wish: `num_blocks` records of its shard from `first_block` on."""

    request_id: str
    epoch: int
    shard: Shard
    first_block: int
    num_blocks: int
    deadline: float  # CLOCK_MONOTONIC, seconds
    chunk_bytes: int  # at once, as far as whole records allow
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def what(self) -> str:
        """For errors' texts: the thing pulled and where it lies."""
        shard = self.shard
        return f"KV of request {self.request_id!r}, epoch {self.epoch}, rank {shard.rank} at {shard.address}"

    @property
    def record_bytes(self) -> int:
        return self.shard.record_bytes

    @property
    def records_a_chunk(self) -> int:
        return max(1, self.chunk_bytes // self.record_bytes)

    def check_time(self) -> None:
        """Raises PullCancelled or PullTimeout."""
        if self.cancellation.is_set:
            raise PullCancelled(f"{self.what}: the request was aborted while it was pulled")
        if time.monotonic() >= self.deadline:
            raise PullTimeout(f"{self.what}: not here within the pull's deadline")


@dataclass(frozen=True)
class Records:
    """A chunk from `first_block` on. data: [n, record_bytes] uint8, valid until the next is asked for.

    digests: [n], as the source computed them; they have come the same way as the data.
    """

    first_block: int
    data: Bytes
    digests: Digests


class Transport(ABC):
    """Called from several threads at once; made once a rank.

    Registered by name in `transports/__init__.py`. A source names what it offers in its shard; the puller
    takes the first of its own list that `reaches` it.
    """

    name: ClassVar[str]

    @abstractmethod
    def reaches(self, shard: Shard) -> bool:
        """Whether the shard offers this transport to a puller here. Does not connect."""

    @abstractmethod
    def pull(self, pull: Pull) -> Iterator[Records]:
        """The records, in order. The consumer copies a chunk out before it asks for the next.

        When asked for the next (or for the end), the transport makes sure that the memory it lent held still.
        Raises TransportError or SourceError and their kinds; checks `pull.check_time` between chunks.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Let go of connections and mappings. Idempotent."""
