"""A process that imports vLLM once and forks every part of a deployment: a restart takes seconds.

As a module it reads commands as JSON lines from stdin and answers each with one line on stdout.
    {"start": name, "kind": kind, "settings": {...}, "log_dir": folder}  ->  {"pid": n}
    {"ended": [pid, ...]}  ->  {"ended": {pid: exit code}}
Ends, and all that it forked with it, when stdin does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support import PYTHON, ROOT

WORKER_KINDS = ("prefill", "decode", "mixed")


class Zygote:
    """The process, as the harness sees it. Its methods block for milliseconds; any thread may call them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lock = threading.Lock()
        self.ask({})  # it has imported all

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the zygote has no pipes")
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the zygote ended")
        return dict(json.loads(line))

    def start(self, name: str, kind: str, settings: dict[str, Any], log_dir: Path) -> int:
        """Fork a part; its process id. Its log is appended to, so that its lives stand in one file."""
        command = {"start": name, "kind": kind, "settings": settings, "log_dir": str(log_dir)}
        return int(self.ask(command)["pid"])

    def ended(self, pids: list[int]) -> dict[int, int]:
        """Exit codes of those that have ended, negative for a signal."""
        return {int(pid): code for pid, code in self.ask({"ended": pids})["ended"].items()}


@contextlib.contextmanager
def zygote(log: Path) -> Iterator[Zygote]:
    """Nothing that it forked outlives the block."""
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [PYTHON, "-m", "tests.chaos.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        ) as process,
    ):
        try:
            yield Zygote(process)
        finally:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(15)
            finally:
                process.kill()


def _serve() -> None:
    from baton.services.cli import processes
    from baton.services.router import app
    from baton.services.worker import lifecycle

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lifecycle.preload()
        app.preload()
    children: dict[int, processes.Child] = {}
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if "start" in command:
            child = processes.spawn(command["start"], _run(command), Path(command["log_dir"]))
            children[child.process.pid or 0] = child
            answer = {"pid": child.process.pid}
        elif "ended" in command:
            codes = {pid: children[pid].process.exitcode for pid in command["ended"]}
            answer = {"ended": {pid: code for pid, code in codes.items() if code is not None}}
        print(json.dumps(answer), flush=True)
    processes.stop_all(list(children.values()), 1.0)


def _run(command: dict[str, Any]) -> Callable[[], None]:
    def run() -> None:
        from baton.services.config import load

        settings = load(command["settings"])
        kind = command["kind"]
        if kind == "scheduler":
            from baton.services.cli.scheduler import run_scheduler

            run_scheduler(settings)
        elif kind == "router":
            from baton.services.leave import leave
            from baton.services.router.app import run_router

            run_router(settings)
            leave(0)
        else:
            from baton.services.worker.lifecycle import run_worker

            run_worker(settings, kind)

    return run


if __name__ == "__main__":
    _serve()
