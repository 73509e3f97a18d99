"""The exit of a process that has an engine's libraries loaded."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

# Of a worker whose engine failed while it served. Requests do that: who restarts it should not count it as a
# fault of the worker's. (EX_SOFTWARE of sysexits.h)
ENGINE_FAILED = 70


def leave(status: int) -> NoReturn:
    """Flush the logs and exit at once, without the interpreter's shutdown.

    That shutdown takes 1.5 s for torch's and vLLM's objects, waits for a thread that may still load a model,
    and prints what extension modules leaked. Everything must have been released before.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_signals(react: Callable[[], None]) -> None:
    """Call `react` on SIGINT and SIGTERM, until other handlers are installed.

    `react` must end the process itself. While vLLM is imported nothing polls for signals, and an exception
    would be lost: imports run callbacks in which Python drops exceptions.
    """

    def on_signal(number: int, frame: object) -> None:
        del number, frame
        react()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


def leave_on_signals(status: int) -> None:
    """Exit at once on SIGINT and SIGTERM: for a start that holds nothing yet."""
    on_signals(lambda: leave(status))
