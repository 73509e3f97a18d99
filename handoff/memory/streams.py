"""An accelerator as a device cache needs it: queues of work, marks in them, pinned memory.

`Inline` is a device without queues, the CPU: all work is done at once. With it the code for accelerators
runs, and is tested, where there is none.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch

from baton.handoff.records import Bytes

logger = logging.getLogger(__name__)


class Mark(Protocol):
    """A place in a queue."""

    def synchronize(self) -> None:
        """Wait until the work before it is done; other threads run meanwhile."""


class Queue(Protocol):
    """Work that a device does in order, concurrently with other queues."""

    def use(self) -> AbstractContextManager[Any]:
        """Return a context in which work is queued here."""

    def after(self, mark: Mark) -> None:
        """Make all work queued from now on wait for the mark; the caller does not wait."""

    def mark(self) -> Mark:
        """Return a mark behind the work queued so far."""


class Device(Protocol):
    """The device on which a cache lies."""

    def queue(self) -> Queue:
        """Return a new queue."""

    def current(self) -> Queue:
        """Return the queue that the calling thread uses: on the engine's thread, the engine's."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the device reads and writes by itself."""

    def pin(self, memory: Bytes) -> None:
        """Turn existing host memory into such memory."""


def of(device: torch.device) -> Device:
    """Return the queues of a torch device."""
    return Cuda(device) if device.type == "cuda" else Inline()


class Cuda:
    """Streams and events of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def queue(self) -> Queue:
        return _Stream(torch.cuda.Stream(self._device))

    def current(self) -> Queue:
        return _Stream(torch.cuda.current_stream(self._device))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: Bytes) -> None:
        """Register the memory. Without it copies are slower, but right all the same."""
        status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.size, 0)
        if int(status) != 0:
            with suppress(RuntimeError):  # the thread's next launch raises the error, whatever it launches
                torch.ones(1, device=self._device)
            logger.warning(
                "%d bytes of staging could not be pinned (CUDA error %d)", memory.size, int(status)
            )


class _Stream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def use(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def after(self, mark: Mark) -> None:
        self._stream.wait_event(mark)

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # else each wait keeps a core busy
        event.record(self._stream)
        mark: Mark = event
        return mark


class Inline:
    """A device that does all work at once."""

    def queue(self) -> Queue:
        return _Done()

    def current(self) -> Queue:
        return _Done()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pin(self, memory: Bytes) -> None:
        pass


class _Done:
    """An empty queue, and a mark in it."""

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def after(self, mark: Mark) -> None:
        pass

    def mark(self) -> Mark:
        return self

    def synchronize(self) -> None:
        pass
