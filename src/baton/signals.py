"""Signals that ask a process to finish its work and end."""

from __future__ import annotations

import asyncio
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


def until_ending() -> asyncio.Event:
    """Return an event that the signals of `ending` set. Call it in the event loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ending():
        loop.add_signal_handler(number, stop.set)
    return stop
