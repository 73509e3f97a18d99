"""Make sure that no process of an engine outlives its host, even if the host is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_ENGINE_PID = "_BATON_ENGINE_PID"  # inherited by every process that the engine starts
_PR_SET_PDEATHSIG = 1


def lead_engine_processes() -> None:
    """Tie the end of later processes to this one: spawned ones on loading plug-ins, forked ones at once."""
    os.environ[_ENGINE_PID] = str(os.getpid())
    os.register_at_fork(after_in_child=follow_engine_process)


def follow_engine_process() -> None:
    """Die with the process that hosts the engine.

    This does nothing in the hosting process itself, or in a router, which loads plug-ins too. vLLM ends its
    rank processes when it shuts down, but not after a SIGKILL.
    """
    leader = os.environ.get(_ENGINE_PID)
    if leader is None or int(leader) == os.getpid() or sys.platform != "linux":
        return
    die_with(int(leader))


def die_with(process: int) -> None:
    """End when the parent's thread that started this process ends; at once if `process` has already ended."""
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if _ended(process):  # it died before prctl, so there will be no signal
            os._exit(1)


def _ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not reaped it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"Z", b"X")
    except FileNotFoundError:
        return True
