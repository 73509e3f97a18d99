"""Signals that ask a process to finish its work and end."""

from __future__ import annotations

import signal

HURRYING = (signal.SIGTERM, signal.SIGINT)  # a second one of these ends a process at once


def ending() -> tuple[signal.Signals, ...]:
    """Return the signals that make this process finish its work and end.

    SIGHUP means that the terminal has closed. It is left out if it is ignored, as under nohup. It may come
    several times, and together with SIGTERM at a logout, so it never hurries an end.

    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return HURRYING
    return (*HURRYING, signal.SIGHUP)
