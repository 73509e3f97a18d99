"""`baton`, as a command: signals end it, whatever its shell does with them."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
from collections.abc import Iterator

import pytest

import baton
from baton.services.vllm_args import VLLM_VERSION
from tests.support import BATON, CALL_S, IGNORING, PYTHON, eventually, free_port, listening

INTERRUPTED = 130


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of one that a script's `baton scheduler &` started; one SIGINT ends it."""
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen([*IGNORING, BATON, "scheduler", "--scheduler", address])
    try:
        eventually(lambda: listening(int(address.rpartition(":")[2])), 60, "the scheduler listens")
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    ("how", "status"),
    [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, -signal.SIGTERM)],
    ids=lambda one: one.name if isinstance(one, signal.Signals) else "",
)
def test_one_signal_ends_what_a_script_started(scheduler: str, how: signal.Signals, status: int) -> None:
    """A shell without job control starts what is behind `&` with SIGINT ignored."""
    screen, theirs = pty.openpty()  # to a file it shows nothing before its end
    os.set_blocking(screen, False)
    command = [*IGNORING, BATON, "status", "--watch", "--scheduler", scheduler]
    process = subprocess.Popen(command, stdout=theirs)
    try:
        eventually(lambda: b"requests in flight" in read(screen), 60, "it shows something")
        process.send_signal(how)
        assert process.wait(20) == status
    finally:
        process.kill()
        process.wait(10)
        os.close(theirs)
        os.close(screen)


def read(screen: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(screen, 1 << 16)
    return b""


def test_it_tells_its_version_and_vllms() -> None:
    done = subprocess.run([BATON, "--version"], capture_output=True, text=True, timeout=CALL_S, check=True)
    assert done.stdout == f"baton {baton.__version__} (vLLM {VLLM_VERSION})\n"


WHILE_IMPORTED = """
import os, signal, sys
from baton.services.cli import entry

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "baton.services.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
entry.main()
"""


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback() -> None:
    done = subprocess.run([PYTHON, "-c", WHILE_IMPORTED], capture_output=True, timeout=CALL_S, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
