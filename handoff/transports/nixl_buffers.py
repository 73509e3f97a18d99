"""The buffers of pulls over NIXL, reused once nothing can write to them.

If a pull gives up, its reads are still running. NIXL forgets a released read, but the network may still
deliver its bytes, so the buffer has to wait for them.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from baton.handoff.records import Bytes

_LINGER_S = 1.0  # time for abandoned reads to end before their peer is disconnected
_SETTLE_S = 5.0  # time after that until nothing can arrive any more


class State(Enum):
    """The state of a read, with NIXL's name for it."""

    UNDER_WAY = "PROC"
    THERE = "DONE"
    FAILED = "ERR"


@dataclass(eq=False)
class Read:
    """A read of a peer's memory into a buffer."""

    peer: str
    what: str  # for error texts
    handle: Any  # NIXL's
    state: State = State.UNDER_WAY
    began_s: float = field(default_factory=time.monotonic)


class Buffer:
    """Memory for the reads of one pull."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data: Bytes = np.frombuffer(memory, np.uint8)
        self.address = int(self.data.ctypes.data)
        self.reads: list[Read] = []  # reads that may still write to it

    def expect(self, read: Read) -> None:
        self.reads = [one for one in self.reads if one.state is not State.THERE]
        self.reads.append(read)

    @property
    def is_quiet(self) -> bool:
        """Whether all its reads are complete."""
        return all(read.state is State.THERE for read in self.reads)


class Buffers:
    """The buffers that no pull uses. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.free: list[Buffer] = []
        self.left: dict[Buffer, float] = {}  # abandoned buffer -> since when, time.monotonic

    def take(self, size: int) -> Buffer | None:
        with self._lock:
            found = next((one for one in self.free if one.data.size >= size), None)
            if found is not None:
                self.free.remove(found)
            return found

    def give(self, buffer: Buffer) -> None:
        with self._lock:
            if buffer.is_quiet:
                self.free.append(buffer)
            else:
                self.left[buffer] = time.monotonic()

    def tend(self, look: Callable[[Read], None], give_up: Callable[[Read], None]) -> None:
        """Free abandoned buffers that nothing can write to any more.

        look: updates a read's state; give_up: fails a read and disconnects its peer.
        """
        with self._lock:
            left = list(self.left.items())
        for buffer, since in left:
            age_s = time.monotonic() - since
            for read in buffer.reads:
                if read.state is State.UNDER_WAY:
                    (look if age_s < _LINGER_S else give_up)(read)
            if buffer.is_quiet or age_s >= _LINGER_S + _SETTLE_S:
                with self._lock:
                    del self.left[buffer]
                    self.free.append(buffer)
