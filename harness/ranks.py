"""Fork vLLM's engine and ranks in tests: on a CPU each would otherwise import vLLM again.

They are forked from a process that was itself forked before the first thread started. A process forked from
one with threads (gRPC's, torch's) may wait for ever for a lock that a thread held.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing import context, forkserver, resource_tracker, util
from typing import Any
from unittest import mock

from baton.services.fleet.processes import PR_SET_PDEATHSIG


class _Rank(context.ForkServerProcess):
    """A process that is forked without threads, with its parent's current environment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        _use(multiprocessing.get_context("fork"))  # an engine forks its ranks as it begins
        super().run()


class _Context(context.ForkServerContext):
    Process = _Rank


def fork_ranks() -> None:
    """Let vLLM fork its engine and ranks. Call it while this process has one thread."""
    resource_tracker.ensure_running()  # must not be a fork
    with mock.patch.object(util, "spawnv_passfds", _forked):
        forkserver.ensure_running()
    _use(_Context())


def _use(processes: context.BaseContext) -> None:
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: processes


def _forked(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Fork the server, for which multiprocessing would execute a new Python. Return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    # It holds both ends of the pipe that should tell it of its parent's end.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if os.getppid() == parent:
            listener, alive = descriptors
            forkserver.main(listener, alive, [])
    finally:
        os._exit(1)
