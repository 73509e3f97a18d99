"""SIGINT and SIGTERM in a supervisor: polled while it serves, handled at once while it imports."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

from baton.services.leave import leave, on_signals


class Stopped(Exception):
    """A signal came, or the owner is gone."""


def wake_on_signals() -> socket.socket:
    """Return a socket that SIGINT or SIGTERM makes readable; a second signal kills this process."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    owner = os.getpid()

    def on_signal(number: int, frame: object) -> None:
        del frame
        if os.getpid() != owner:  # a child so young that it has no handlers of its own
            os._exit(128 + number)
        signal.signal(number, signal.SIG_DFL)
        writing.send(b"x")

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    return reading


@contextmanager
def left_on_signals(
    stops: list[socket.socket | int], end: Callable[[], None], ended: Callable[[], None]
) -> Iterator[None]:
    """Let a signal's handler stop everything itself, while `stops` is not polled and nothing is forked."""

    def end_at_once() -> None:
        for one in usual:  # a second signal kills this process, and its children with it
            signal.signal(one, signal.SIG_DFL)
        end()
        ended()
        leave(0)

    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    on_signals(end_at_once)
    if wait(stops, timeout=0):  # a signal came before
        raise Stopped
    yield
    for number, handler in usual.items():
        signal.signal(number, handler)
