"""Waiting with a deadline, free ports, processes and their shared memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
PYTHON = Path(sys.executable)
BATON = PYTHON.with_name("baton")
# This command also works if the package is on Python's path but not installed.
COMMAND = (
    [str(BATON)]
    if BATON.exists()
    else [str(PYTHON), "-c", "from baton.services.cli.entry import main; main()"]
)
# Command prefix that ignores SIGINT, as a script's `command &` does.
IGNORING = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
# Command prefix that resets SIGINT, even if the tests were started with it ignored.
INTERRUPTIBLE = ["env", "--default-signal=INT"]
# Tests specify timeouts for an idle machine and wait this many times as long, because a busy machine
# sometimes stalls for seconds. Only failing tests wait to the end.
PATIENCE = 4
END_S = 30.0
# For processes that the harness forks: five heartbeats per second with the usual lease.
QUICK = {"baton.services.config.workers:HEARTBEATS": 25}
CALL_S = 30.0 * PATIENCE  # timeout of a request or command that takes a second or two on an idle machine


def eventually(look: Callable[[], T | None], timeout_s: float, what: str, every_s: float = 0.05) -> T:
    """Call `look` until it returns something true, and return that.

    Raises an AssertionError that names `what` after timeout_s * PATIENCE.
    """
    deadline = time.monotonic() + timeout_s * PATIENCE
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s * PATIENCE:g} s: {what}")
        time.sleep(every_s)


def freeze(pid: int) -> None:
    """Send SIGSTOP, and return when the process has stopped.

    On a busy machine that takes a while: until then it handles what comes, even a later SIGTERM.
    """
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        with contextlib.suppress(OSError):  # a thread has just ended
            threads = [one.read_text() for one in Path(f"/proc/{pid}/task").glob("*/stat")]
            return {one.rpartition(") ")[2][0] for one in threads} == {"T"}
        return False

    eventually(stopped, 10, f"{pid} has stopped", every_s=0.002)


# Each pytest worker has its own range of ports, below the kernel's ephemeral ports.
_PORTS_EACH = 4_000
_first_port = 10_000 + _PORTS_EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 5)
_ports = (_first_port + number % _PORTS_EACH for number in itertools.count(os.getpid()))


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """Yield the writing end of a pipe that is full and is not read."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(512))
    os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(writing)
        os.close(reading)


def free_port() -> int:
    """Return a free loopback TCP port that no other pytest worker gets."""
    for port in itertools.islice(_ports, _PORTS_EACH):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def free_ports() -> int:
    """Return the first of two free neighbouring ports."""
    port = free_port()
    while (after := free_port()) != port + 1:
        port = after
    return port


def listening(port: int) -> bool:
    """Return whether a process accepts connections on this loopback port."""
    with socket.socket() as client:
        client.settimeout(0.5)
        return client.connect_ex(("127.0.0.1", port)) == 0


def listener(port: int) -> psutil.Process:
    """Return the process that listens on this port."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,) and one.pid:
            return psutil.Process(one.pid)
    raise AssertionError(f"no process listens on port {port}")


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends between the two calls
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def signals_of(pid: int, *fields: str) -> set[int]:
    """Return a process's signals in these fields of /proc/PID/status: SigPnd, ShdPnd (pending), SigIgn."""
    lines = (line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    masks = [int(value, 16) for name, value in lines if name in fields]
    return {number for number in signal.valid_signals() if any(mask >> number - 1 & 1 for mask in masks)}


def segments(processes: list[psutil.Process]) -> list[Path]:
    """Return the shared memory of these processes."""
    theirs = {str(one.pid) for one in processes}
    return [path for path in Path("/dev/shm").glob("baton-*") if theirs.intersection(path.name.split("-"))]


def ran(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, for at most CALL_S; return its status and output."""
    words = [str(word) for word in command]
    return subprocess.run(words, **{"capture_output": True, "text": True, "timeout": CALL_S, **options})  # noqa: PLW1510


@contextlib.contextmanager
def running(
    command: Sequence[object],
    ready: Callable[[], object],
    start_s: float,
    log: Path = Path(os.devnull),
    **options: Any,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command during the block with its output in `log`. Yield it once it is ready."""
    words = [str(word) for word in command]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, **options)

    def look() -> object:
        assert process.poll() is None, log.read_text()
        return ready()

    try:
        eventually(look, start_s, f"{words[0]} is ready")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)
