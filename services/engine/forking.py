"""Find out whether a process forked from this one could use the GPU.

CUDA does not survive a fork, and torch refuses it in the child. CUDA is initialized with the first tensor on
a GPU or, if NVML cannot count the GPUs, when something counts them, as vLLM does on import. Before its first
call to the CUDA runtime, torch installs a handler that sets `_is_in_bad_fork` in forked children.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

_LOOK_S = 5.0  # seconds for the child's answer, which usually takes milliseconds


def cuda_begun() -> bool:
    """Return whether CUDA is initialized here, so that a forked process could not use it.

    Counting GPUs leaves no trace in this process, so, if torch is built for GPUs, a forked child finds out. A
    child that hangs counts as unable to use CUDA. This process must have only one thread. Raises OSError if
    there is no room for another process.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.backends.cuda.is_built():
        return False
    return torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork() or _lost_in_a_fork(torch)


def _lost_in_a_fork(torch: Any) -> bool:
    if not (pid := os.fork()):
        status = 2
        try:
            status = int(torch.cuda._is_in_bad_fork())
        finally:
            os._exit(status)
    deadline = time.monotonic() + _LOOK_S
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            done = os.waitpid(pid, 0)
            break
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(done[1]) != 0
