"""Handle the signals that end a supervisor: polled while it serves, handled at once while it imports."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

from baton import signals
from baton.services.leave import leave, on_signals


class Stopped(Exception):
    """A signal came, or the owner has died."""


def wake_on_signals() -> socket.socket:
    """Return a socket that SIGINT, SIGTERM or SIGHUP makes readable.

    A second SIGINT or SIGTERM kills this process.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    owner = os.getpid()

    def on_signal(number: int, frame: object) -> None:
        del frame
        if os.getpid() != owner:  # a child that has not set its own handlers yet
            os._exit(128 + number)
        if number in signals.HURRYING:
            let_next_kill()
        with suppress(BlockingIOError):  # many SIGHUPs have filled the socket
            writing.send(b"x")

    for number in signals.ending():
        signal.signal(number, on_signal)
    return reading


def let_next_kill() -> None:
    """Let the next SIGINT or SIGTERM kill this process."""
    for one in signals.HURRYING:
        signal.signal(one, signal.SIG_DFL)


@contextmanager
def left_on_signals(
    stops: list[socket.socket | int], end: Callable[[], None], ended: Callable[[], None]
) -> Iterator[None]:
    """Let signals end everything at once, while `stops` is not polled and nothing is forked."""

    def end_at_once() -> None:
        let_next_kill()  # its children die with it
        if signal.SIGHUP in usual:
            signal.signal(signal.SIGHUP, lambda *_: None)
        end()
        ended()
        leave(0)

    usual = {number: signal.getsignal(number) for number in signals.ending()}
    on_signals(end_at_once)
    if wait(stops, timeout=0):  # a signal came before
        raise Stopped
    yield
    for number, handler in usual.items():
        signal.signal(number, handler)
