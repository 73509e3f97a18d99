"""The signals that ask a process to finish its work and end."""

from __future__ import annotations

import signal

HURRYING = (signal.SIGTERM, signal.SIGINT)  # the second of these ends a process at once


def ending() -> tuple[signal.Signals, ...]:
    """Return the signals on which this process finishes its work and ends.

    SIGHUP says that the terminal has closed. It is left out where it is ignored, as under nohup. It may come
    several times, and together with SIGTERM, as at a logout: it never hurries an end.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return HURRYING
    return (*HURRYING, signal.SIGHUP)
