"""Exit a process that has an engine's libraries loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from baton import signals
from baton.services import printing

# Exit status of a worker whose engine failed while serving (EX_SOFTWARE in sysexits.h). A request can cause
# this, so a supervisor should not count it as the worker's fault.
ENGINE_FAILED = 70


def leave(status: int) -> NoReturn:
    """Flush the logs and exit at once, without the interpreter's shutdown.

    With torch and vLLM that shutdown takes 1.5 s, waits for a thread that may still be loading a model, and
    prints what extension modules leaked. Release everything first. The process exits with `status` within
    seconds even if its output cannot be written.
    """
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGALRM, lambda *_: os._exit(status))
        signal.setitimer(signal.ITIMER_REAL, 2 * printing.LAST_S)
    printing.finish()
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):  # libraries may have written to them
        with contextlib.suppress(OSError, ValueError, AttributeError):
            flush()
    os._exit(status)


def on_signals(react: Callable[[], None]) -> None:
    """Call `react` on SIGINT, SIGTERM and SIGHUP, until other handlers are installed.

    `react` must end the process itself. For use while vLLM is imported: nothing polls for signals then, and
    an exception may be lost, because imports run callbacks in which Python drops exceptions.
    """

    def on_signal(number: int, frame: object) -> None:
        del number, frame
        react()

    for number in signals.ending():
        signal.signal(number, on_signal)


def leave_on_signals(status: int) -> None:
    """Exit at once on SIGINT, SIGTERM and SIGHUP, while there is nothing to clean up."""
    on_signals(lambda: leave(status))
