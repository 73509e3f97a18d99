"""Starts router processes quickly: vLLM is imported once, each router is a fork, as in `baton up`.

As a module it is that parent: a line of JSON on stdin is a router's settings, answered with its process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.support import PYTHON, ROOT, eventually


class Zygote:
    """The parent process, as a test sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.services.router.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            text=True,
        )
        self._routers: list[RouterProcess] = []

    def router(self, log: Path, **settings: Any) -> RouterProcess:
        """Start a router with these sections of settings; what it prints goes to `log`."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the pipes are missing")
        log.touch()
        self._process.stdin.write(json.dumps({"log": str(log), "settings": settings}) + "\n")
        self._process.stdin.flush()
        router = RouterProcess(int(self._process.stdout.readline()), log)
        self._routers.append(router)
        return router

    def close(self) -> None:
        """Nothing stays behind, however a test ended."""
        for router in self._routers:
            with contextlib.suppress(ProcessLookupError):
                router.signal(signal.SIGKILL)
        with self._process:  # which closes the pipes
            self._process.kill()


class RouterProcess:
    """One router. Its exit status is written to its log's end."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 15.0) -> int:
        """Its exit status."""
        eventually(lambda: "\nexit " in self.text, timeout_s, f"the router ends; it said: {self.text}")
        return int(self.text.rpartition("\nexit ")[2])


def _serve() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from baton.services.router.app import preload

        preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended routers leave no zombies
    for line in sys.stdin:
        asked = json.loads(line)
        router = os.fork()
        if router == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(Path(asked["log"]), asked["settings"])
        print(router, flush=True)


def _run(log: Path, settings: dict[str, Any]) -> None:
    from baton.errors import BatonError
    from baton.services.config import load
    from baton.services.router.app import run_router

    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    status = 0
    try:
        run_router(load(settings))
    except BatonError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    print(f"\nexit {status}", flush=True)
    os._exit(status)


if __name__ == "__main__":
    _serve()
