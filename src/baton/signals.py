"""Signals that ask a process to finish its work and exit."""

from __future__ import annotations

import asyncio
import signal

HURRYING = (signal.SIGTERM, signal.SIGINT)  # a second one ends the process at once


def ending() -> tuple[signal.Signals, ...]:
    """Return the signals that make this process finish its work and exit.

    SIGHUP (the terminal was closed) is one of them unless it is ignored, as under nohup. It is not in
    `HURRYING`, because a logout may send it several times, and SIGTERM as well.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return HURRYING
    return (*HURRYING, signal.SIGHUP)


def until_ending() -> asyncio.Event:
    """Return an event that these signals set. Call it in the event loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ending():
        loop.add_signal_handler(number, stop.set)
    return stop
