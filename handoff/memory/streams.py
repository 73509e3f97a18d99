"""What a device cache needs of an accelerator: queues of work, marks in them, pinned memory.

`Inline` is a device without queues, the CPU: everything is done when it is asked for. With it the code for
accelerators runs, and is tested, where there is none.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from baton.handoff.records import Bytes

logger = logging.getLogger(__name__)


class Mark(Protocol):
    """A place in a queue."""

    def synchronize(self) -> None:
        """Wait until the work before it is done; other threads run meanwhile."""


class Queue(Protocol):
    """Work that a device does in order, beside that of other queues."""

    def use(self) -> AbstractContextManager[Any]:
        """What is queued inside, is queued here."""

    def after(self, mark: Mark) -> None:
        """What is queued from now on waits for the mark; the caller does not."""

    def mark(self) -> Mark:
        """Behind what is queued so far."""


class Device(Protocol):
    def queue(self) -> Queue:
        """A new one."""

    def current(self) -> Queue:
        """The one that the calling thread uses, the engine's on the engine's thread."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device reads and writes by itself."""

    def pin(self, memory: Bytes) -> None:
        """Make host memory such."""


def of(device: torch.device) -> Device:
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
        """Copies to memory that could not be registered are right all the same, and slower."""
        status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.size, 0)
        if int(status) != 0:
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
        event: Mark = self._stream.record_event()
        return event


class Inline:
    """A device that has done everything at once."""

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
