"""Define what a device cache needs of an accelerator: queues of work, marks in them, pinned memory."""

from __future__ import annotations

import bisect
import logging
import threading
from collections import deque
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch

from baton.handoff.records import Bytes

logger = logging.getLogger(__name__)

_READ_ONLY = 8  # cudaHostRegisterReadOnly


class Mark(Protocol):
    """A position in a queue."""

    def synchronize(self) -> None:
        """Wait, without the GIL, until the work before it is done."""


class Queue:
    """Work that a device does in order, concurrently with other queues."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def use(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def after(self, mark: Mark) -> None:
        """Make later work wait for the mark. Does not block."""
        self._stream.wait_event(mark)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # waits sleep instead of keeping a core busy
        event.record(self._stream)
        mark: Mark = event
        return mark


class Pins:
    """The pinned pieces of host memory. No copy may span two of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._stops: list[int] = []
        # Starts of freed pieces. Finalizers add them without the lock, which their thread may already hold.
        self._gone: deque[int] = deque()

    def add(self, start: int, stop: int) -> None:
        with self._lock:
            self._forget()
            at = bisect.bisect(self._starts, start)
            self._starts.insert(at, start)
            self._stops.insert(at, stop)

    def remove(self, start: int) -> None:
        self._gone.append(start)

    def _forget(self) -> None:
        while self._gone:
            at = bisect.bisect_left(self._starts, self._gone.popleft())
            del self._starts[at], self._stops[at]

    def parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the pinned pieces of [start, stop) as offsets from start; [] if there is a gap."""
        found, at = [], start
        with self._lock:
            self._forget()
            number = bisect.bisect(self._starts, start) - 1
            while at < stop:
                if (
                    not 0 <= number < len(self._starts)
                    or not self._starts[number] <= at < self._stops[number]
                ):
                    return []
                end = min(stop, self._stops[number])
                found.append((at - start, end - start))
                at, number = end, number + 1
        return found


class Device:
    """The GPU that holds a cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pins = Pins()

    def queue(self) -> Queue:
        return Queue(torch.cuda.Stream(self._device))

    def current(self) -> Queue:
        """Return the calling thread's queue; on the engine's thread, the engine's."""
        return Queue(torch.cuda.current_stream(self._device))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: Bytes) -> bool:
        """Pin existing host memory. Return whether that succeeded; without it, copies are only slower."""
        flags = 0 if memory.flags.writeable else _READ_ONLY
        if status := self._registered("cudaHostRegister", memory.ctypes.data, memory.size, flags):
            logger.warning("%d bytes of staging could not be pinned (CUDA error %d)", memory.size, status)
            return False
        self._pins.add(memory.ctypes.data, memory.ctypes.data + memory.size)
        return True

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped."""
        self._pins.remove(address)
        self._registered("cudaHostUnregister", address)

    def pinned_parts(self, memory: Bytes) -> list[tuple[int, int]]:
        """Return (start, stop) of the bytes that one copy may span; empty unless all are pinned."""
        return self._pins.parts(memory.ctypes.data, memory.ctypes.data + memory.size)

    def _registered(self, function: str, *arguments: int) -> int:
        """Call CUDA, and return its status."""
        with torch.cuda.device(self._device):  # new threads start with the first device, not the rank's
            status = int(getattr(torch.cuda.cudart(), function)(*arguments))
        if status != 0:
            with suppress(RuntimeError):  # clears the error, which the thread's next launch would raise
                torch.ones(1, device=self._device)
        return status
