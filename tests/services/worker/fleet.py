"""Real workers for the tests: forked from one zygote, registered with a real scheduler."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support import BATON, PYTHON, ROOT, eventually, free_port

START_TIMEOUT_S = 60.0
_names = itertools.count()
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(eq=False)
class Worker:
    """One worker's process."""

    name: str
    pid: int
    address: str
    metrics: str
    log: Path
    fleet: Fleet

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing tells it: negative for a signal; None while it lives."""
        code = self.fleet.ask({"exitcode": self.pid})["exitcode"]
        return None if code is None else int(code)

    def ended(self, timeout_s: float = 20.0) -> int:
        """Wait for its end; the exit code."""
        return eventually(lambda: _some(self.exitcode), timeout_s, f"{self.name} ends")[0]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def error(self) -> str:
        """The one line that it ended with."""
        lines = [line for line in self.text.splitlines() if line.startswith("baton: error: ")]
        assert len(lines) == 1, self.text
        return lines[0].removeprefix("baton: error: ")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def serving(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                assert self.exitcode is None, self.text
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def figure(self, name: str) -> float:
        """The sum over labels of one figure of its metrics."""
        with urllib.request.urlopen(self.metrics, timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        found = [
            float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].split(" ")[0] == name
        ]
        return sum(found)


def _some(code: int | None) -> list[int]:
    return [] if code is None else [code]


class Fleet:
    """Starts workers. Made by `fleet`."""

    def __init__(self, zygote: subprocess.Popen[str], scheduler: str, model: Path, log_dir: Path) -> None:
        self._zygote = zygote
        self.scheduler = scheduler
        self.model = model
        self._log_dir = log_dir
        self.preloaded_s: float = self._answer()["preloaded_s"]

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(command) + "\n")
        self._zygote.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._zygote.stdout is not None
        line = self._zygote.stdout.readline()
        assert line, "the zygote ended"
        return dict(json.loads(line))

    def start(self, role: str, **changes: dict[str, Any]) -> Worker:
        """Start a worker and do not wait for it. `changes` are settings, section by section."""
        name = f"{role}-{next(_names)}"
        port, metrics_port = free_port(), free_port()
        settings: dict[str, Any] = {
            "engine": {
                "model": str(self.model),
                "served_model_name": "tiny",
                "dtype": "float32",
                "max_model_len": 1024,
                "max_num_batched_tokens": 256,
                "kv_cache_gib": 0.125,
            },
            "scheduler": {"address": self.scheduler},
            "worker": {
                "listen": f"127.0.0.1:{port}",
                "metrics_port": metrics_port,
                "worker_id": name,
                "drain_timeout_s": 20,
                "scheduler_wait_s": 5,
            },
            "handoff": {"staging_mib": 32},
        }
        for section, values in changes.items():
            settings[section].update(values)
        answer = self.ask({"start": name, "role": role, "settings": settings, "log_dir": str(self._log_dir)})
        address = settings["worker"]["listen"]
        metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        return Worker(name, answer["pid"], address, metrics, Path(answer["log"]), self)

    def started(self, role: str, **changes: dict[str, Any]) -> Worker:
        """Start a worker and wait until it serves."""
        worker = self.start(role, **changes)
        eventually(worker.serving, START_TIMEOUT_S, f"{worker.name} serves")
        return worker


@contextlib.contextmanager
def fleet(model: Path, log_dir: Path, scheduler_settings: Mapping[str, Any] = _NONE) -> Iterator[Fleet]:
    """A scheduler and a zygote; all that they started is gone at the end."""
    address = f"127.0.0.1:{free_port()}"
    chosen = {f"BATON_SCHEDULER__{name.upper()}": str(value) for name, value in scheduler_settings.items()}
    with (
        (log_dir / "scheduler.log").open("wb") as log,
        (log_dir / "zygote.log").open("wb") as errors,
        subprocess.Popen(
            [BATON, "scheduler"],
            env={**os.environ, **chosen, "BATON_SCHEDULER__ADDRESS": address},
            stdout=log,
            stderr=log,
        ) as scheduler,
        subprocess.Popen(
            [PYTHON, "-m", "tests.services.worker.zygote"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as zygote,
    ):
        try:
            yield Fleet(zygote, address, model, log_dir)
        finally:
            assert zygote.stdin is not None
            zygote.stdin.close()
            try:
                zygote.wait(15)
            finally:
                zygote.kill()
                scheduler.kill()
