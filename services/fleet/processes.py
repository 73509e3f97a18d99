"""Child processes of a supervisor: forked, logged to a file, stopped within a deadline, never left behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import cast

import setproctitle

from baton.errors import BatonError
from baton.services.leave import ENGINE_FAILED

PR_SET_PDEATHSIG = 1
_fork = multiprocessing.get_context("fork")


@dataclass
class Child:
    """One forked process. Its log file holds all that it and its predecessors of the same name printed.

    Without one it prints where its parent does.
    """

    name: str
    process: ForkProcess
    log: Path | None
    log_from: int  # bytes; the offset at which this process's own output begins
    started_at: float  # time.monotonic, seconds

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def left(self) -> bool:
        """Whether it exited in good order, because it was drained."""
        return self.process.exitcode == 0

    @property
    def engine_failed(self) -> bool:
        """Whether it ended as its engine failed while it served: a request can do that."""
        return self.process.exitcode == ENGINE_FAILED

    def how_it_ended(self) -> str:
        """Return the end of a process that has ended: `status 1` or `signal SIGKILL`."""
        code = self.process.exitcode or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"

    def last_error(self) -> str:
        """Return the last error line that it printed, else its last line."""
        if self.log is None:
            return "see what it printed"
        printed = self.log.read_bytes()[self.log_from :].decode(errors="replace")
        lines = [line for line in printed.splitlines() if line.strip()]
        own = [line for line in lines if line.startswith("baton: error: ")]
        return (own or lines or ["it printed nothing"])[-1].removeprefix("baton: error: ")

    def last_words(self) -> str:
        """Return its last error, and where it is to be read."""
        return self.last_error() + (f" (log: {self.log})" if self.log else "")


def spawn(name: str, target: Callable[[], None], log_dir: Path | None) -> Child:
    """Fork a child that runs `target`; it inherits all modules imported here.

    Without a folder for its log it also inherits where this process prints.
    """
    log, log_from = log_dir and log_dir / f"{name}.log", 0
    if log is not None:
        with log.open("ab") as file:  # created here, for a child that is killed at once
            log_from = file.tell()
    process = _fork.Process(
        target=_child_main, args=(name, target, log, os.getpid()), name=name, daemon=False
    )
    process.start()
    return Child(name, process, log, log_from, time.monotonic())


def stop_all(
    children: Sequence[Child], timeout_s: float, ended: Callable[[Child], None] = lambda _: None
) -> list[Child]:
    """Send SIGTERM to all, SIGKILL to those still alive after `timeout_s`; return the latter.

    Calls `ended` for each of the others as soon as it is gone.
    """
    left: dict[int, Child] = {}  # by sentinel
    for child in children:
        if child.alive:
            child.process.terminate()
            left[child.process.sentinel] = child
        else:
            ended(child)
    deadline = time.monotonic() + timeout_s
    while left and (gone := wait(list(left), max(0.0, deadline - time.monotonic()))):
        for sentinel in gone:
            child = left.pop(cast(int, sentinel))
            child.process.join()
            ended(child)
    stubborn = [child for child in left.values() if child.alive]
    for child in stubborn:
        child.process.kill()
        child.process.join()
    return stubborn


def _child_main(name: str, target: Callable[[], None], log: Path | None, parent: int) -> None:
    setproctitle.setproctitle(f"baton {name}")
    # A process group of its own: Ctrl-C in the terminal reaches the parent alone, which stops its children.
    os.setpgid(0, 0)
    # SIGKILL, as without the parent nobody waits for a drain.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if log is not None:
        # Appended: what a part printed before it died matters most after its restart.
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    try:
        target()
    except BatonError as error:
        print(f"baton: error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except Exception:  # noqa: BLE001 (whatever ends a process belongs in its log)
        traceback.print_exc()
        sys.exit(1)
