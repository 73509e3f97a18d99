"""Collect the tests once, then run them in forked workers, which take one group of files after the other."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import pytest

from harness import support


class _Worker:
    """A forked process, as the process that collected the tests sees it."""

    def __init__(self, session: pytest.Session, number: int, others: Iterable[_Worker]) -> None:
        self.connection, theirs = Pipe()
        self.given: list[int] = []  # items that it has not started
        self.started: int | None = None
        self.number = number
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self.pid = os.fork()
        if self.pid == 0:
            for one in (self, *others):  # whose connections end with the collector
                one.connection.close()
            _become(session, number, theirs, base / f"worker-{number}")
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)  # a process of a test may keep the connection open

    def end(self) -> int:
        """Wait for its end, which can take as long as a test. Return its exit code."""
        self.connection.close()
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run(session: pytest.Session, workers: int, groups: Sequence[Sequence[int]]) -> None:
    """Run groups of session.items, given by their indices, in this order."""
    waiting = deque(list(group) for group in groups)
    alive: dict[int, _Worker] = {}

    def start(number: int) -> None:
        alive[number] = _Worker(session, number, alive.values())

    try:
        for number in range(min(workers, len(groups))):
            start(number)
        while alive:
            for worker in _ready(list(alive.values())):
                if _hear(session, worker, waiting):
                    continue
                code = worker.end()
                del alive[worker.number]
                if code:
                    _crashed(session, worker, code)
                    if worker.given:
                        waiting.appendleft(worker.given)
                if waiting and not session.shouldfail:
                    start(worker.number)
            if session.shouldfail:
                waiting.clear()
                for worker in alive.values():
                    with contextlib.suppress(OSError):
                        worker.connection.send(None)
    finally:
        for worker in alive.values():
            worker.end()


def _ready(workers: list[_Worker]) -> list[_Worker]:
    ready = wait([one for worker in workers for one in (worker.connection, worker.pidfd)])
    return [one for one in workers if one.connection in ready or one.pidfd in ready]


def _hear(session: pytest.Session, worker: _Worker, waiting: deque[list[int]]) -> bool:
    """Carry out one message of a worker. Return False if it has ended."""
    try:
        if not worker.connection.poll():
            return False
        kind, content = worker.connection.recv()
    except (EOFError, OSError):
        return False
    hook = session.config.hook
    if kind == "take":
        group = waiting.popleft() if waiting else None
        worker.given = [*worker.given, *(group or ())]
        with contextlib.suppress(OSError):
            worker.connection.send(group)
    elif kind == "start":
        worker.started = content
        worker.given.remove(content)
    elif kind == "end":
        worker.started = None
    elif kind == "report":
        report = hook.pytest_report_from_serializable(config=session.config, data=content)
        hook.pytest_runtest_logreport(report=report)
    elif kind == "warning":
        hook.pytest_warning_recorded.call_historic(kwargs=content)
    return True


def _crashed(session: pytest.Session, worker: _Worker, code: int) -> None:
    said = f"worker {worker.number} ended with code {code}"
    if worker.started is None:
        session.shouldfail = f"{said} between tests"
        return
    item = session.items[worker.started]
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def _become(session: pytest.Session, number: int, connection: Connection, base: Any) -> None:
    """Be a worker, and end."""
    code = 1
    try:
        _set_up(session.config, number, connection, base)
        _work(session, connection)
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:  # noqa: BLE001 (a fork must not return into the collector's frames)
        os.write(2, traceback.format_exc().encode())
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def _set_up(config: pytest.Config, number: int, connection: Connection, base: Any) -> None:
    """Replace what workers must not share, and send the collector what its plug-ins report."""
    support.use_ports(number)
    plugins = config.pluginmanager
    capture: Any = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    base.mkdir(exist_ok=True)
    config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
    reporter: Any = plugins.unregister(name="terminalreporter")
    plugins.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")  # pytest-timeout writes to it
    sender = _Sender(config)
    plugins.register(sender)  # which repeats the warnings so far
    sender.connection = connection


class _Sender:
    """Sends reports to the process that collected the tests."""

    connection: Connection | None = None

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("report", data)

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        warning_message.source = None  # cannot be sent
        content = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self._send("warning", content)

    def _send(self, kind: str, content: Any) -> None:
        if self.connection is not None:
            self.connection.send((kind, content))


def _work(session: pytest.Session, connection: Connection) -> None:
    def groups() -> Iterator[list[int]]:
        with contextlib.suppress(EOFError, OSError):  # the collector has ended
            connection.send(("take", None))
            while (group := connection.recv()) is not None:
                yield group
                connection.send(("take", None))

    numbers = itertools.chain.from_iterable(groups())
    try:
        number = next(numbers, None)
        # A message that nobody asked for, or the end of the connection, ends the work.
        while number is not None and not connection.poll() and not session.shouldfail:
            following = next(numbers, None)  # may use the same fixtures
            item, after = session.items[number], None if following is None else session.items[following]
            connection.send(("start", number))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            connection.send(("end", number))
            number = following
    finally:
        session._setupstate.teardown_exact(None)
