"""A process that imports vLLM once, and forks what tests start: each start takes seconds less.

As a module it reads commands as JSON lines from stdin and answers each with one line on stdout.
    {"start": name, "call": "module:function", "arguments": {...}, "log_dir": folder}
        ->  {"pid": n, "log": path}
    {"ended": [pid, ...]}  ->  {"ended": {pid: exit code}}
It ends when stdin does, and all that it forked with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import PYTHON, ROOT

ANSWER_S = 100.0  # of the first one, which waits for the imports, on a busy machine
STOP_S = 20.0


@dataclass
class Forked:
    """One forked process, in the terms of subprocess.Popen."""

    zygote: Zygote
    pid: int
    log: Path
    returncode: int | None = None

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        if self.returncode is None:
            self.returncode = self.zygote.ended([self.pid]).get(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([self.log.stem], timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process, as tests see it. Its methods block for milliseconds; any thread may call them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            # Workers that know their cores use them all; others would wait for each other on a busy machine.
            # torch reads its level when it is loaded; a cold start has set it by then (services/logs.py).
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            text=True,
        )
        self._lock = threading.Lock()

    def start(self, name: str, call: str, log_dir: Path, /, **arguments: Any) -> Forked:
        """Fork a process that calls `module:function`. To its log, NAME.log, all lives of it are appended."""
        command = {"start": name, "call": call, "arguments": arguments, "log_dir": str(log_dir)}
        answer = self._ask(command)
        return Forked(self, answer["pid"], Path(answer["log"]))

    def baton(self, name: str, arguments: list[str], log_dir: Path, path: str = "") -> Forked:
        """Fork a process that runs `baton ARGUMENT ...`; `path`: a folder of packages beside ours."""
        return self.start(name, "tests.zygote:run_baton", log_dir, arguments=arguments, path=path)

    def ended(self, pids: list[int]) -> dict[int, int]:
        """Exit codes of those that have ended, negative for a signal."""
        return {int(pid): code for pid, code in self._ask({"ended": pids})["ended"].items()}

    def close(self) -> None:
        """Nothing that it forked outlives this."""
        with self._process:  # which closes the pipes
            if self._process.stdin is not None:
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            self._process.kill()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the zygote has no pipes")
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
                raise RuntimeError(f"the zygote does not answer within {ANSWER_S:g} s")
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the zygote ended")
        return dict(json.loads(line))


@functools.cache
def shared() -> Zygote:
    """The one of this process, which ends with it. The first call starts it."""
    made = Zygote()
    atexit.register(made.close)
    return made


def end_all(processes: Sequence[Forked], timeout_s: float) -> None:
    """SIGTERM to all, SIGKILL to those that are still there at the deadline."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()


def run_baton(arguments: list[str], path: str = "") -> None:
    """In the forked process: the command line as the entry point sees it."""
    from baton.services.cli.main import main

    if path:  # as PYTHONPATH would have put it
        sys.path.insert(0, path)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    sys.argv = ["baton", *arguments]
    main()


def _serve() -> None:
    from baton.services.cli import processes
    from baton.services.router import app
    from baton.services.worker import lifecycle

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lifecycle.preload()
        app.preload()
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that the children share
    children: dict[int, processes.Child] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            child = processes.spawn(command["start"], _call(command), Path(command["log_dir"]))
            children[child.process.pid or 0] = child
            answer: dict[str, Any] = {"pid": child.process.pid, "log": str(child.log)}
        else:
            codes = {pid: children[pid].process.exitcode for pid in command["ended"]}
            answer = {"ended": {pid: code for pid, code in codes.items() if code is not None}}
        print(json.dumps(answer), flush=True)
    processes.stop_all(list(children.values()), STOP_S / 2)


def _call(command: dict[str, Any]) -> Callable[[], None]:
    module, _, function = command["call"].partition(":")

    def run() -> None:
        getattr(importlib.import_module(module), function)(**command["arguments"])

    return run


if __name__ == "__main__":
    _serve()
