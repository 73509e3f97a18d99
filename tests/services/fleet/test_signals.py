"""The signals that end a supervisor: the first one drains, a second one kills, but SIGHUP never kills."""

import contextlib
import select
import signal
import subprocess
from pathlib import Path

import pytest

from harness.support import CALL_S, PYTHON, eventually, ran

SUPERVISOR = """
import signal, sys, threading
from baton.services.fleet.parts import Parts
from baton.services.fleet.signals import wake_on_signals
if "ignored" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
stop = wake_on_signals()
if "late" in sys.argv:  # another thread takes the signal, so that it does not interrupt this one's wait
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
parts = Parts(None, print)
print("begun", flush=True)
while stop not in parts.wait([stop]):
    pass
print("told", flush=True)
while True:
    signal.pause()
"""


@contextlib.contextmanager
def supervisor(*arguments):
    command = [PYTHON, "-c", SUPERVISOR, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


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
def test_the_second_signal_kills(numbers, status):
    with supervisor() as process:
        first, *more = numbers
        process.send_signal(first)
        assert process.stdout.readline() == "told\n"
        for number in more:
            process.send_signal(number)
        if status is not None:
            assert process.wait(CALL_S) == status
            return
        eventually(lambda: not pending(process.pid), 10, "it has taken the signals")
        assert process.poll() is None


def pending(pid):
    with Path(f"/proc/{pid}/status").open() as file:
        found = dict(line.split(":\t", 1) for line in file if line.startswith(("SigPnd", "ShdPnd")))
    return any(int(value, 16) for value in found.values())


def test_under_nohup_the_terminals_end_means_nothing():
    with supervisor("ignored") as process:
        process.send_signal(signal.SIGHUP)
        assert not select.select([process.stdout], [], [], 0.3)[0]
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "told\n"


def test_a_signal_that_interrupts_no_wait_is_noticed():
    """As when it comes just before the wait."""
    with supervisor("late") as process:
        process.send_signal(signal.SIGTERM)
        assert select.select([process.stdout], [], [], CALL_S)[0]
        assert process.stdout.readline() == "told\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_a_part_inherits_an_ignored_sighup_and_nothing_else(ignored, tmp_path):
    program = f"""
import os, signal, sys, time
from pathlib import Path
from baton.services.fleet import processes
signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignored} else lambda *_: None)
child = processes.spawn("part", lambda: (os.write(1, b"begun"), signal.pause()), Path(sys.argv[1]))
while b"begun" not in child.log.read_bytes():
    time.sleep(0.01)
os.kill(child.process.pid, signal.SIGHUP)
child.process.join(0.3 if {ignored} else 60)
print(child.process.exitcode)
child.process.kill()
"""
    done = ran(PYTHON, "-c", program, tmp_path, check=True)
    assert done.stdout.strip() == ("None" if ignored else str(-signal.SIGHUP))
