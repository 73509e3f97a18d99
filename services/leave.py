"""How a process with an engine's libraries in it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End this process at once; all must be said and released before.

    The interpreter's own end takes 1.5 s more for torch's and vLLM's objects, waits for a thread that may
    still load a model, and prints what extension modules leaked.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_signals(react: Callable[[], None]) -> None:
    """Have `react` called with SIGINT and SIGTERM, for as long as nobody else takes them.

    While vLLM is imported nothing else looks at what came, and an exception cannot be raised there: import
    runs callbacks in which Python drops it. So `react` ends the process itself where it shall end.
    """

    def on_signal(number: int, frame: object) -> None:
        del number, frame
        react()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


def leave_on_signals(status: int) -> None:
    """SIGINT and SIGTERM end this process at once: for a start that holds nothing yet."""
    on_signals(lambda: leave(status))
