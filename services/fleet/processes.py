"""Run a supervisor's child processes: forked, logged to a file, stopped within a deadline, never left behind.

If CUDA is initialised in the supervisor, a forked process could not use it, so each child is a new program.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess, SpawnProcess
from pathlib import Path
from typing import Any, cast

import setproctitle

from baton.errors import BatonError
from baton.services.config import ENV_PREFIX
from baton.services.engine.forking import cuda_begun
from baton.services.fleet import log_files
from baton.services.fleet.endings import ending
from baton.services.leave import ENGINE_FAILED
from baton.services.printing import complain

PR_SET_PDEATHSIG = 1
KILLED_S = 5.0  # the kernel ends a killed process at once, unless a device or a network disk holds it
_fork = multiprocessing.get_context("fork")
_new = multiprocessing.get_context("spawn")


@dataclass
class Child:
    """One process. Its log has the output of all processes of its name; None: it uses its parent's output."""

    name: str
    process: ForkProcess | SpawnProcess
    log: Path | None
    log_from: int  # byte offset at which this process's own output begins
    started_at: float  # time.monotonic, seconds
    log_problem: str = ""  # why it has no log
    forked: bool = True  # False: it is a new program

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def left(self) -> bool:
        """Whether it exited with status 0, after a drain."""
        return self.process.exitcode == 0

    @property
    def engine_failed(self) -> bool:
        """Whether its engine failed while serving, which a request can cause."""
        return self.process.exitcode == ENGINE_FAILED

    def how_it_ended(self) -> str:
        """Return its exit status or signal: `status 1` or `signal SIGKILL`."""
        return ending(self.process.exitcode)

    def last_error(self) -> str:
        """Return the last error that it printed, or else its last line."""
        if self.log is None:
            return "see what it printed"
        lines = log_files.tail(self.log, self.log_from)
        return log_files.own_error(lines) or (lines or ["it printed nothing"])[-1]

    def last_words(self, why: str) -> str:
        """Return its last error; without one, how it ended and its last line, which may be unrelated."""
        where = f" (log: {self.log})" if self.log else ""
        if self.log and (told := log_files.own_error(log_files.tail(self.log, self.log_from))):
            return told + where
        how = f"it ended with {self.how_it_ended()}{why and f', as {why}'}"
        return (
            f"{how}; it said last: {self.last_error()}{where}" if self.log else f"{how}; {self.last_error()}"
        )


def spawn(name: str, target: Callable[[], None], log_dir: Path | None) -> Child:
    """Fork a child that runs `target`; it inherits all modules imported here.

    If CUDA is initialised here, the child is a new program that gets `target` pickled. Without a log folder
    it inherits this process's output. If its log cannot be opened it runs without one, because serving
    matters more. Raises OSError if the machine cannot start another process.
    """
    log, log_from, output, problem = log_dir and log_dir / f"{name}.log", 0, -1, ""
    if log is not None:
        try:
            output = log_files.open_log(log)  # opened here, in case the child is killed at once
            log_from = os.fstat(output).st_size
        except OSError as error:
            problem = f"{error.strerror}: {log}"
            output = os.open(os.devnull, os.O_WRONLY)
    try:
        forked = not cuda_begun()
        process = (_fork if forked else _new).Process(
            target=_child_main, args=(name, target, _Descriptor(output), os.getpid()), name=name, daemon=False
        )
        process.start()
    finally:
        if output >= 0:
            os.close(output)
    return Child(name, process, log, log_from, time.monotonic(), problem, forked)


def stop_all(
    children: Sequence[Child],
    timeout_s: float,
    ended: Callable[[Child], None] = lambda _: None,
    told: Callable[[], None] = lambda: None,
) -> list[Child]:
    """Send SIGTERM to all, SIGKILL to those still alive after `timeout_s`; return the latter.

    Calls `told` once SIGTERM has been sent to all, and `ended` for each that ends in time, as soon as it has
    exited.
    """
    left: dict[int, Child] = {}  # keyed by sentinel
    for child in children:
        if child.alive:
            child.process.terminate()
            left[child.process.sentinel] = child
        else:
            ended(child)
    told()
    deadline = time.monotonic() + timeout_s
    while left and (gone := wait(list(left), max(0.0, deadline - time.monotonic()))):
        for sentinel in gone:
            child = left.pop(cast(int, sentinel))
            child.process.join()
            ended(child)
    stubborn = [child for child in left.values() if child.alive]
    for child in stubborn:
        child.process.kill()
    for child in stubborn:
        child.process.join(KILLED_S)
    return stubborn


def start_supervisor(*arguments: str, log: Path, cwd: str | None = None) -> subprocess.Popen[str]:
    """Start a module of ours that supervises parts for this process and talks over stdin and stdout.

    Its settings come over stdin, not from the environment. Raises OSError.
    """
    with os.fdopen(log_files.open_log(log), "ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],  # -P: the current folder must not shadow modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="backslashreplace",
            env={key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)},
            cwd=cwd,
            start_new_session=True,  # Ctrl-C must only reach the command in the terminal
        )


def end_supervisor(process: subprocess.Popen[str], within_s: float) -> None:
    """End a supervisor and its parts; kill them if it takes longer."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()  # its children die with it
        process.wait()


class _Descriptor(int):
    """A descriptor, or -1 for none, that is duplicated into a new program."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_received, (reduction.DupFd(int(self)),)) if self >= 0 else (_Descriptor, (-1,))


def _received(copy: Any) -> _Descriptor:
    return _Descriptor(copy.detach())


def _child_main(name: str, target: Callable[[], None], output: int, parent: int) -> None:
    setproctitle.setproctitle(f"baton {name}")
    # Its own process group: Ctrl-C in the terminal then reaches only the parent, which stops its children.
    os.setpgid(0, 0)
    # SIGKILL: without the parent there is no point in a drain.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if output >= 0:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    try:
        target()
    except BatonError as error:
        complain(f"baton: error: {error}")
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 (the log must show it)
        complain("".join(traceback.format_exception(error)).rstrip())
        sys.exit(1)
