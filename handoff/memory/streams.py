"""Define what a device cache needs of an accelerator: queues of work, marks in them, pinned memory."""

from __future__ import annotations

import bisect
import logging
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
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
    """Work that a device does in order, concurrently with other queues. This class works immediately."""

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def after(self, mark: Mark) -> None:
        """Make later work wait for the mark. Does not block."""

    def mark(self) -> Mark:
        return self

    def synchronize(self) -> None:
        """Do nothing: the queue is its own mark, and its work is done."""


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
    """The device that holds a cache. Here it is the CPU, so that the code for accelerators can be tested."""

    def __init__(self) -> None:
        self._pins = Pins()

    def queue(self) -> Queue:
        return Queue()

    def current(self) -> Queue:
        """Return the calling thread's queue; on the engine's thread, the engine's."""
        return Queue()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pin(self, memory: Bytes) -> bool:
        """Pin existing host memory. Return whether that succeeded."""
        self._pins.add(memory.ctypes.data, memory.ctypes.data + memory.size)
        return True

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped."""
        self._pins.remove(address)

    def pinned_parts(self, memory: Bytes) -> list[tuple[int, int]]:
        """Return (start, stop) of the bytes that one copy may span; empty unless all are pinned."""
        return self._pins.parts(memory.ctypes.data, memory.ctypes.data + memory.size)


def of(device: torch.device) -> Device:
    return Cuda(device) if device.type == "cuda" else Device()


class Cuda(Device):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def queue(self) -> Queue:
        return _Stream(torch.cuda.Stream(self._device))

    def current(self) -> Queue:
        return _Stream(torch.cuda.current_stream(self._device))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: Bytes) -> bool:
        # after a failure, copies are slower but still correct
        flags = 0 if memory.flags.writeable else _READ_ONLY
        with torch.cuda.device(self._device):  # new threads start with the first device, not the rank's
            status = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.size, flags))
        if status != 0:
            self._forget_error()
            logger.warning("%d bytes of staging could not be pinned (CUDA error %d)", memory.size, status)
            return False
        return super().pin(memory)

    def unpin(self, address: int) -> None:
        super().unpin(address)
        with torch.cuda.device(self._device):
            status = int(torch.cuda.cudart().cudaHostUnregister(address))
        if status != 0:
            self._forget_error()

    def _forget_error(self) -> None:
        """Clear a failed call's error, which the thread's next launch would raise."""
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


class _Stream(Queue):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def use(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def after(self, mark: Mark) -> None:
        self._stream.wait_event(mark)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # waits sleep instead of keeping a core busy
        event.record(self._stream)
        mark: Mark = event
        return mark
