"""Memory into which pulls over NIXL read, and its reuse: only when nothing may write to it any more.

A pull that gives up leaves its reads on their way. NIXL forgets one that is let go of, but the network brings
its bytes all the same; so the buffer waits for them.
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

_LINGER_S = 1.0  # for reads to end by themselves; then they are given up, and their peer is disconnected
_SETTLE_S = 5.0  # from then on until nothing can come any more


class State(Enum):
    """The state of a read, by NIXL's word for it."""

    UNDER_WAY = "PROC"
    THERE = "DONE"
    FAILED = "ERR"


@dataclass(eq=False)
class Read:
    """Bytes of a peer on their way into a buffer. `what` is for the texts of errors."""

    peer: str
    what: str
    handle: Any  # NIXL's
    state: State = State.UNDER_WAY
    began_s: float = field(default_factory=time.monotonic)


class Buffer:
    """Memory of this process into which reads of one pull go."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data: Bytes = np.frombuffer(memory, np.uint8)
        self.address = int(self.data.ctypes.data)
        self.reads: list[Read] = []  # those that may still write to it

    def expect(self, read: Read) -> None:
        """Note a read that begins."""
        self.reads = [one for one in self.reads if one.state is not State.THERE]
        self.reads.append(read)

    @property
    def is_quiet(self) -> bool:
        """Whether all its reads have brought their bytes."""
        return all(read.state is State.THERE for read in self.reads)


class Buffers:
    """The buffers that no pull has. Safe for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.free: list[Buffer] = []
        self.left: dict[Buffer, float] = {}  # by pulls that gave up; since when, time.monotonic

    def take(self, size: int) -> Buffer | None:
        """Return a free one of at least `size` bytes, None if there is none."""
        with self._lock:
            found = next((one for one in self.free if one.data.size >= size), None)
            if found is not None:
                self.free.remove(found)
            return found

    def give(self, buffer: Buffer) -> None:
        """Take one back from its pull."""
        with self._lock:
            if buffer.is_quiet:
                self.free.append(buffer)
            else:
                self.left[buffer] = time.monotonic()

    def tend(self, look: Callable[[Read], None], give_up: Callable[[Read], None]) -> None:
        """Free those to which nothing can be written any more.

        look: brings a read's state up to date; give_up: disconnects the peer of one, which has failed then.
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
