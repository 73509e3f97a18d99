"""Fork vLLM's engine and ranks in tests; by default each would import vLLM again.

They are forked from a server process that was forked before any thread started: a process forked from one
with threads (gRPC's, torch's) may deadlock on a lock that a thread held.
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
from harness.support import free_port


class _Rank(context.ForkServerProcess):
    """A process of the fork server that gets its parent's current environment."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        _use(multiprocessing.get_context("fork"))  # an engine forks its ranks before it has threads
        super().run()


class _Context(context.ForkServerContext):
    Process = _Rank


def fork_ranks() -> None:
    """Make vLLM fork its engine and ranks. Call this while the process has one thread."""
    resource_tracker.ensure_running()  # started here, because it must not be forked
    with mock.patch.object(util, "spawnv_passfds", _forked):
        forkserver.ensure_running()
    _use(_Context())


def _use(processes: context.BaseContext) -> None:
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: processes


def _forked(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Fork the fork server, instead of executing a new Python. Return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    # The fork server has both ends of the pipe that signals its parent's end, so use a death signal instead.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        if os.getppid() == parent:
            listener, alive = descriptors
            forkserver.main(listener, alive, [])
    finally:
        os._exit(1)


def alone_in_step(host: Any) -> Any:
    """Return the lock-step of a gang of one engine, the only member of its gloo group."""
    from vllm.distributed.utils import stateless_init_torch_distributed_process_group

    from baton.services.engine.data_parallel import lockstep_of

    engine = host._engine
    engine.dp_group = stateless_init_torch_distributed_process_group("127.0.0.1", free_port(), 0, 1, "gloo")
    return lockstep_of(engine, host._ring_others)
