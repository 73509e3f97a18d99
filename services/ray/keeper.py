"""The actor of a node: owns one `baton node`, tells it what to run, and collects its reports.

`baton node` is a separate process because an actor's process has threads, so it cannot fork an engine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from baton.keeping import keep_thread
from baton.services.errors import ConfigError, StartError
from baton.services.fleet import log_files
from baton.services.fleet.endings import ending
from baton.services.fleet.ports import check_port, reserved
from baton.services.fleet.processes import end_supervisor, start_supervisor

EVENTS = 1_000  # kept until fetched; older ones are dropped
STARTS = 5  # failed starts of `baton node` in a row; then it stays down and its owner is told
END_S = 10.0
RETRY_S = 5.0


@dataclass
class Report:
    """A node's state, and events since the last report."""

    order: int  # number of its latest order; -1: none
    states: dict[str, str] = field(default_factory=dict)  # part -> running, restarting, leaving, given up
    said: list[tuple[str, str]] = field(default_factory=list)  # part, text
    failed: str = ""  # why no part can run here
    log_dir: str = ""


class Keeper:
    """Runs parts on its node. Runs as an actor."""

    def __init__(self, log_dir: str, cwd: str) -> None:
        """Log to a subfolder of `log_dir` named after this host, or to a temporary folder if that is ""."""
        host = socket.gethostname()
        if log_dir:
            folder = Path(log_dir) / host
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(tempfile.mkdtemp(prefix="baton-"))
        self._log_dir = folder
        self._cwd = cwd if Path(cwd).is_dir() else None
        self._order = -1
        self._parts: list[dict[str, Any]] = []
        self._states: dict[str, str] = {}
        self._said: deque[tuple[str, str]] = deque(maxlen=EVENTS)
        self._failed = ""
        self._starts = 0
        self._start_at = 0.0  # time.monotonic of the next try, after a process could not start
        self._ports: list[socket.socket] = []
        self._process: subprocess.Popen[str] | None = None

    def port(self, address: str) -> int:
        """Reserve a free port on this node while this actor lives."""
        self._ports.append(reserved(address))
        return int(self._ports[-1].getsockname()[1])

    def why_not(self, key: str, host: str, port: int) -> str:
        """Return why no part can listen on this host and port, or ""."""
        try:
            check_port(key, host, port)
        except (ConfigError, StartError) as error:
            return str(error)
        return ""

    def run(self, order: int, parts: list[dict[str, Any]]) -> None:
        """Start and drain parts so that exactly these run. `order` increases with each call."""
        self._order, self._parts = order, parts
        self._starts, self._failed = 0, ""
        if self._process is None and not parts:
            return
        self._tell()

    def report(self) -> Report:
        """Return the state, and events since the last call."""
        if self._process is not None and self._process.poll() is not None:
            _close(self._process.stdin)
            self._ended(self._process.returncode)
        elif self._process is None and self._parts and not self._failed and time.monotonic() > self._start_at:
            self._tell()
        said = [self._said.popleft() for _ in range(len(self._said))]
        return Report(self._order, dict(self._states), said, self._failed, str(self._log_dir))

    def end(self) -> None:
        """End `baton node` with all its parts, and release the ports."""
        while self._ports:
            self._ports.pop().close()
        if self._process is not None:
            end_supervisor(self._process, END_S)
            _close(self._process.stdin)

    def _tell(self) -> None:
        try:
            process = self._process or self._start()
        except OSError as error:  # such as the limit on processes
            self._starts -= 1
            self._start_at = time.monotonic() + RETRY_S
            self._said.append(("node", f"not started: {error.strerror or error}; retrying in {RETRY_S:g} s"))
            return
        stdin = cast(IO[str], process.stdin)
        with suppress(BrokenPipeError):  # it has ended, as the next report shows
            stdin.write(json.dumps(self._parts) + "\n")
            stdin.flush()

    def _start(self) -> subprocess.Popen[str]:
        self._starts += 1
        command = ("baton.services.cli.main", "node", "--orders", "--log-dir", str(self._log_dir))
        process = start_supervisor(*command, log=self._log_dir / "node.log", cwd=self._cwd)
        self._process = process
        self._raise_priority(process.pid)
        keep_thread(partial(self._hear, process), "baton node events").start()
        return process

    def _raise_priority(self, pid: int) -> None:
        """Give `baton node` the priority of Ray itself, whose workers run at niceness 15."""
        wanted, has = (os.getpriority(os.PRIO_PROCESS, one) for one in (os.getppid(), pid))
        if has <= wanted:
            return
        try:
            os.setpriority(os.PRIO_PROCESS, pid, wanted)
        except PermissionError:
            text = f"runs at niceness {has}, like all that Ray starts: start Ray with RAY_worker_niceness=0"
            self._said.append(("node", text))

    def _hear(self, process: subprocess.Popen[str]) -> None:
        with cast(IO[str], process.stdout) as events:
            for line in events:
                try:
                    event = json.loads(line)
                    if event["event"] == "said":
                        self._said.append((event["name"], event["text"]))
                    elif process is self._process:
                        self._states = event["states"]
                except (ValueError, TypeError, KeyError):
                    self._said.append(("node", line.strip()))  # a library printed it

    def _ended(self, status: int) -> None:
        """Restart `baton node`, unless it has ended too often."""
        self._process, self._states = None, {}
        if self._failed or not self._parts:
            return
        lines = log_files.tail(self._log_dir / "node.log")
        last = log_files.own_error(lines) or (lines or ["it printed nothing"])[-1]
        why = f"baton node ended with {ending(status)}: {last}"
        self._said.append(("node", why))
        if self._starts >= STARTS:
            self._failed = why
        else:
            self._tell()


def _close(pipe: IO[str] | None) -> None:
    with suppress(BrokenPipeError):  # it ended before it had read everything
        cast(IO[str], pipe).close()
