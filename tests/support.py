"""What tests share: waiting with a deadline, free ports, real servers."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
BATON = ROOT / ".venv" / "bin" / "baton"
PYTHON = ROOT / ".venv" / "bin" / "python"
# Before a command: it starts with SIGINT ignored, as from a script's `command &`.
IGNORING = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]


def eventually(look: Callable[[], T], timeout_s: float, what: str, every_s: float = 0.05) -> T:
    """Call `look` until it returns something true; its value. AssertionError names `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(every_s)


def free_port() -> int:
    """A loopback TCP port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listening(port: int) -> bool:
    """Whether somebody accepts connections on this loopback port."""
    with socket.socket() as client:
        client.settimeout(0.5)
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def redis_server(port: int, password: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A real redis-server on loopback, without persistence, ended at the end."""
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(
        command + (["--requirepass", password] if password else []), stdout=subprocess.DEVNULL
    )
    try:
        eventually(lambda: listening(port), 10, f"redis-server listens on {port}")
        yield process
    finally:
        process.kill()
        process.wait(10)
