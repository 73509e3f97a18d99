"""The signals that end a supervisor: the first one drains, a second one kills, but SIGHUP never kills."""

import contextlib
import os
import signal
import threading

import pytest

from baton.services.fleet.parts import Parts
from baton.services.fleet.processes import spawn
from baton.services.fleet.signals import wake_on_signals
from harness.support import CALL_S, eventually, signals_of


def supervise(ignored, late):
    """Run a supervisor that says when it has begun, and when it is told to end."""
    if ignored:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = wake_on_signals()
    if late:  # another thread takes the signal, so that it does not interrupt this one's wait
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parts = Parts(None, print)
    os.write(1, b"begun\n")
    while stop not in parts.wait([stop]):
        pass
    os.write(1, b"told\n")
    while True:
        signal.pause()


@contextlib.contextmanager
def supervisor(folder, *, ignored=False, late=False):
    child = spawn("supervisor", lambda: supervise(ignored, late), folder)
    try:
        says(child, "begun")
        yield child
    finally:
        child.process.kill()
        child.process.join()


def says(child, word):
    eventually(lambda: word in child.log.read_text(), 20, f"it says {word!r}", 0.005)


@pytest.mark.parametrize(
    ("numbers", "status"),
    [
        ((signal.SIGTERM, signal.SIGTERM), -signal.SIGTERM),
        ((signal.SIGINT, signal.SIGTERM), -signal.SIGTERM),
        ((signal.SIGTERM, signal.SIGINT), -signal.SIGINT),
        ((signal.SIGHUP, signal.SIGHUP, signal.SIGTERM), None),
        ((signal.SIGTERM, signal.SIGHUP), None),
    ],
)
def test_the_second_signal_kills(numbers, status, tmp_path):
    with supervisor(tmp_path) as child:
        first, *more = numbers
        os.kill(child.process.pid, first)
        says(child, "told")
        for number in more:
            os.kill(child.process.pid, number)
        if status is not None:
            child.process.join(CALL_S)
            assert child.process.exitcode == status
            return
        eventually(lambda: not signals_of(child.process.pid, "SigPnd", "ShdPnd"), 10, "it has taken them")
        assert child.alive


def test_under_nohup_the_terminals_end_means_nothing(tmp_path):
    """The kernel discards a signal that is ignored."""
    with supervisor(tmp_path, ignored=True) as child:
        assert signal.SIGHUP in signals_of(child.process.pid, "SigIgn")
        os.kill(child.process.pid, signal.SIGHUP)
        os.kill(child.process.pid, signal.SIGTERM)
        says(child, "told")


def test_a_signal_that_interrupts_no_wait_is_noticed(tmp_path):
    """As when it comes just before the wait."""
    with supervisor(tmp_path, late=True) as child:
        os.kill(child.process.pid, signal.SIGTERM)
        says(child, "told")


@pytest.mark.parametrize(("ignored", "ended"), [(False, str(-signal.SIGHUP)), (True, "None")])
def test_a_part_inherits_an_ignored_sighup_and_nothing_else(ignored, ended, tmp_path):
    def parent():
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
        child = spawn("part", lambda: (os.write(1, b"begun"), signal.pause()), tmp_path)
        try:
            says(child, "begun")
            os.kill(child.process.pid, signal.SIGHUP)
            child.process.join(0.3 if ignored else CALL_S)
            os.write(1, f"\n{child.process.exitcode}\n".encode())
        finally:
            child.process.kill()

    child = spawn("parent", parent, tmp_path)
    child.process.join(2 * CALL_S)
    assert child.process.exitcode == 0, child.log.read_text()
    assert ended in child.log.read_text().splitlines()  # gRPC may print lines when a process forks
