"""The command `baton` as a process: signals, terminals, and where its output may go."""

import contextlib
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

import baton
from baton.services.engine.args import VLLM_VERSION
from harness.support import BATON, CALL_S, IGNORING, PYTHON, eventually, free_port, full_pipe, listening, ran

INTERRUPTED = 130


@pytest.fixture(scope="module")
def scheduler():
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen([*IGNORING, BATON, "scheduler", "--scheduler", address])
    try:
        eventually(lambda: listening(int(address.rpartition(":")[2])), 60, "the scheduler listens")
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(CALL_S) == 0
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    ("where", "how", "status"),
    [
        ("xterm", signal.SIGINT, INTERRUPTED),
        ("xterm", signal.SIGTERM, -signal.SIGTERM),
        ("dumb", signal.SIGTERM, -signal.SIGTERM),
        ("file", signal.SIGINT, INTERRUPTED),
    ],
)
def test_watching_prints_each_refresh_at_once_until_a_signal(scheduler, where, how, status, tmp_path):
    """On a terminal with a cursor, on one without, and in a file.

    A shell without job control starts background commands with SIGINT ignored.
    """
    file = tmp_path / "shown" if where == "file" else None
    with watching(scheduler, where, file) as (process, shown):
        eventually(lambda: shown().count(b"requests in flight") >= 2, 60, "it shows two of them")
        process.send_signal(how)
        assert process.wait(CALL_S) == status


@contextlib.contextmanager
def watching(scheduler, terminal, file):
    """Run `baton status --watch` on a terminal or into a file; yield a function that returns its output."""
    screen, theirs = pty.openpty()
    os.set_blocking(screen, False)
    seen = bytearray()

    def shown():
        if file:
            return file.read_bytes()
        with contextlib.suppress(BlockingIOError):
            seen.extend(os.read(screen, 1 << 16))
        return bytes(seen)

    with contextlib.ExitStack() as ends:
        ends.callback(os.close, screen)
        ends.callback(os.close, theirs)
        process = subprocess.Popen(
            [*IGNORING, BATON, "status", "--watch", "--scheduler", scheduler],
            stdout=ends.enter_context(file.open("wb")) if file else theirs,
            env={**os.environ, "TERM": terminal},
        )
        ends.callback(process.wait, CALL_S)
        ends.callback(process.kill)
        yield process, shown


def test_version_of_baton_and_of_vllm():
    done = ran(BATON, "--version")
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


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback():
    done = ran(PYTHON, "-c", WHILE_IMPORTED)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_help_imports_neither_grpc_nor_an_engine():
    code = """
import sys
from baton.services.cli import entry
for command in ("up", "ca revoke"):
    sys.argv = ["baton", *command.split(), "--help"]
    try:
        entry.main()
    except SystemExit as end:
        assert not end.code
    print(f"{command} imported:", sorted({"grpc", "torch", "vllm"} & set(sys.modules)))
"""
    done = ran(PYTHON, "-c", code, check=True)
    for command in ("up", "ca revoke"):
        assert f"Usage: baton {command} " in done.stdout
        assert f"\n{command} imported: []\n" in done.stdout


def test_output_that_cannot_be_printed_is_one_line():
    with Path("/dev/full").open("wb") as full:
        done = ran(BATON, "--version", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (1, "baton: error: cannot print: No space left on device\n")


def test_a_bugs_message_is_printed_last():
    """At exit, extension modules would print dozens of lines after it if vLLM is imported."""
    code = """
import atexit, os
import baton.services.cli.main as command
atexit.register(os.write, 2, b"leaked\\n")
def app():
    raise RuntimeError("a bug")
command.app = app
command.main()"""
    done = ran(PYTHON, "-c", code)
    first, *_, last = done.stderr.splitlines()
    assert (done.returncode, first[:9], last) == (1, "Traceback", "RuntimeError: a bug")


@pytest.mark.parametrize("closed", [False, True])
def test_a_process_serves_though_its_logs_are_not_read(closed):
    """It also ends on the first signal. test_printing.py has full disks and readers that left."""
    port = free_port()
    command = [BATON, "scheduler", "--scheduler", f"127.0.0.1:{port}"]
    if closed:
        command = ["sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh", *command]
    with full_pipe() as writing, subprocess.Popen(command, stdout=writing, stderr=writing) as process:
        try:
            eventually(lambda: listening(port), 60, "it listens")
            process.send_signal(signal.SIGHUP)
            assert process.wait(CALL_S) == 0
        finally:
            process.kill()
