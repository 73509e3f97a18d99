"""Let process groups of one rank share one Gloo device, and so one polling thread.

Each of an engine's 13 groups, even one with a single rank, polls a hundred times a second: half of an idle
engine's load.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

from baton.services.engine.patches.replace import replaces


@replaces(
    "torch.distributed.distributed_c10d:ProcessGroupGloo.__init__",
    *("self", "store", "rank", "size", "options"),
)
def _share_device(  # noqa: PLR0917 (vLLM's parameters)
    original: Any, self: Any, store: Any, rank: int, size: int, timeout: timedelta
) -> None:
    if size > 1:
        original(self, store, rank, size, timeout)
        return
    options = type(self)._Options()
    options._devices, options._threads, options._timeout = [_device(os.getpid())], 1, timeout
    original(self, store, rank, size, options)


@functools.cache
def _device(pid: int) -> Any:
    """Return the device of this process. A forked process needs its own, as threads do not survive a fork."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    del pid
    return ProcessGroupGloo.create_default_device()
