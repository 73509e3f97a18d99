"""Let groups of one rank share one of Gloo's devices, and so its polling thread.

Leans on: torch.distributed's ProcessGroupGloo (create_default_device) and its _Options (_devices, _threads,
_timeout).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from baton.services.engine.patches.replace import replace


def install() -> None:
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    replace(ProcessGroupGloo, "__init__", sharing, ("self", "store", "rank", "size", "options"))


@functools.cache
def _device(pid: int) -> Any:
    """Return this process's device: a forked process has no thread of its parent's."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    del pid
    return ProcessGroupGloo.create_default_device()


def sharing(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constructor that makes a group of one rank on the shared device."""

    def __init__(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if size > 1:
            shipped(self, store, rank, size, timeout)
            return
        options = type(self)._Options()
        options._devices, options._threads, options._timeout = [_device(os.getpid())], 1, timeout
        shipped(self, store, rank, size, options)

    return __init__
