"""Run a worker's helper process, which forks a process for each trial of a grammar.

The worker forks the helper before it starts any thread, so the helper has the worker's imports. If the helper
dies, the worker starts another one from scratch. The helper has only one thread, because it may fork at any
time, and ends with the worker.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import setproctitle

from baton.services.engine.grammars.messages import Done, End, Limits, Open, Run, Verdict, loads
from baton.services.engine.process import die_with

NO_PROCESS = "the machine has no room for another process"
_STACK_BYTES = 4 << 20  # less than the engine's threads have, so that deep recursion fails here first

logger = logging.getLogger(__name__)


@dataclass
class Helper:
    """The helper process, seen from its worker. It ends when the connection closes."""

    pid: int
    connection: socket.socket

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)


def fork_helper() -> Helper:
    """Fork the helper. This process must have only one thread; the helper ends when that thread does."""
    ours, theirs = socket.socketpair()
    worker = os.getpid()
    if pid := os.fork():
        theirs.close()
        return Helper(pid, ours)
    try:
        ours.close()
        _help(theirs.detach(), worker)
    except BaseException:
        logger.exception("the process that tries grammars failed")
    finally:
        os._exit(1)


def spawn_helper() -> Helper:
    """Start the helper as a new program, which takes a few seconds to import vLLM."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        pid = os.posix_spawn(sys.executable, command, os.environ)
    return Helper(pid, ours)


def _help(descriptor: int, worker: int) -> NoReturn:
    die_with(worker)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a draining worker still needs the helper
    setproctitle.setproctitle(f"baton: grammars of process {worker}")
    _Server(Connection(descriptor)).serve()


@dataclass
class _Trial:
    number: int
    pid: int
    pipe: int
    until: float  # time.monotonic
    result: bytearray = field(default_factory=bytearray)
    late: bool = False


class _Server:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._bench: Any = None
        self._trials: dict[int, _Trial] = {}  # keyed by number

    def serve(self) -> NoReturn:
        while True:
            now = time.monotonic()
            waits = [trial.until - now for trial in self._trials.values() if not trial.late]
            for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
                if key.fileobj is self._connection:
                    self._obey()
                else:
                    self._read(key.data)
            for trial in list(self._trials.values()):
                if not trial.late and trial.until <= time.monotonic():
                    trial.late = True
                    os.kill(trial.pid, signal.SIGKILL)

    def _obey(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):  # the other end has closed, perhaps in the middle of a message
            for trial in self._trials.values():
                os.kill(trial.pid, signal.SIGKILL)
            os._exit(0)
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Run):
            self._run(message)
        elif isinstance(message, End) and message.number in self._trials:
            os.kill(self._trials[message.number].pid, signal.SIGKILL)

    def _open(self, message: Open) -> None:
        from baton.services.engine.grammars.trial import Bench

        self._bench = Bench(loads(message.context))
        self._bench.prepare()
        gc.collect()
        gc.freeze()  # otherwise garbage collection in a trial would copy all pages of this process

    def _run(self, message: Run) -> None:
        reads, writes = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(reads)
            os.close(writes)
            self._connection.send(Done(message.number, None, NO_PROCESS))
            return
        if not pid:
            os.close(reads)
            _try(lambda: self._bench.try_out(loads(message.params)), writes, message.limits)
        os.close(writes)
        trial = _Trial(message.number, pid, reads, time.monotonic() + message.limits.wall_s)
        self._trials[message.number] = trial
        self._selector.register(reads, selectors.EVENT_READ, trial)

    def _read(self, trial: _Trial) -> None:
        if part := os.read(trial.pipe, 1 << 20):
            trial.result += part
            return
        self._selector.unregister(trial.pipe)
        os.close(trial.pipe)
        _, status = os.waitpid(trial.pid, 0)
        del self._trials[trial.number]
        verdict, ended_by = None, "time" if trial.late else ""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            ended_by = ended_by or ("CPU" if number == signal.SIGPROF else signal.Signals(number).name)
        elif trial.result:
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                verdict = loads(trial.result)
        self._connection.send(Done(trial.number, verdict, ended_by))


def _try(trial: Callable[[], Verdict], pipe: int, limits: Limits) -> NoReturn:
    try:
        die_with(os.getppid())
        os.setpriority(os.PRIO_PROCESS, 0, limits.nice)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
        _limit_memory(limits.memory_bytes)
        _silence()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        try:
            verdict = trial()
        except MemoryError:
            verdict = Verdict(problem=too_large(limits))
        signal.setitimer(signal.ITIMER_PROF, 0)
        with open(pipe, "wb") as file:
            pickle.dump(verdict, file)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 (becomes the verdict)
        with contextlib.suppress(BaseException), open(pipe, "wb") as file:
            pickle.dump(Verdict(problem=f"{type(error).__name__}: {error}"), file)
        os._exit(1)


def too_large(limits: Limits) -> str:
    return (
        f"this grammar is too costly: its compilation needs more than {limits.memory_bytes >> 20} MiB; use "
        "fewer properties or alternatives, and repetitions with smaller bounds"
    )


def _limit_memory(more: int) -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _silence() -> None:
    """Silence stdout and stderr: compilers warn about each odd keyword, and a client may send many."""
    logging.disable()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


if __name__ == "__main__":
    _help(int(sys.argv[1]), int(sys.argv[2]))
