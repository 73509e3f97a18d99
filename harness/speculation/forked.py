"""Run a whole deployment in a forked process, as `baton up` does; see harness/zygote.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.services.config import Settings
from baton.services.fleet import devices, supervisor


def run(fleet: dict[str, int], settings: dict[str, Any], logs: str) -> None:
    """Serve until a signal, with one core per worker: two threads that wait for each other crawl."""
    devices.assign = _one_core_each
    supervisor.supervise(Settings(**settings), supervisor.Fleet(**fleet), logs, _Log())


def _one_core_each(gpus: Sequence[int], named: Sequence[str] | None = None) -> list[devices.Devices]:
    del named
    cores = devices._cpus(max(len(gpus), 2))
    return cores[: len(gpus)]


class _Log:
    """The supervisor's observer, which prints."""

    def begun(self, log_dir: object) -> None:
        del log_dir

    def step(self, since_start_s: float, name: str, text: str) -> None:
        print(f"[{since_start_s:5.1f} s] {name} {text}", flush=True)

    def ready(self) -> None:
        print("Ready.", flush=True)

    def ending(self, drain_s: float) -> None:
        del drain_s
        print("ending", flush=True)

    def ended(self) -> None:
        print("ended", flush=True)
