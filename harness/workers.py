"""Real workers that are forked from the zygote and registered with a real scheduler."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from harness import zygote
from harness.deployment import status_of
from harness.netns import Host
from harness.scrape import total
from harness.support import QUICK, eventually, free_port
from harness.zygote import Forked, end_all

START_TIMEOUT_S, ALL_START_S = 60.0, 240.0
END_S = 3.0
LOOPBACK = "127.0.0.1"
_names = itertools.count()
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(eq=False)
class Worker:
    name: str
    process: Forked
    address: str
    metrics: str
    scheduler: str  # its address
    host: Host | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exitcode(self) -> int | None:
        return self.process.poll()

    def ended(self, timeout_s: float = 20.0) -> int:
        eventually(lambda: self.exitcode is not None, timeout_s, f"{self.name} ends")
        return self.process.returncode or 0

    @property
    def text(self) -> str:
        return self.process.text

    @property
    def error(self) -> str:
        lines = [line for line in self.text.splitlines() if line.startswith("baton: error: ")]
        assert len(lines) == 1, self.text
        return lines[0].removeprefix("baton: error: ")

    def stacks(self) -> str:
        """Return its log after each of its processes has dumped its threads' stacks there."""
        worker = psutil.Process(self.pid)
        processes = [worker, *worker.children(recursive=True)]
        forked = [one for one in processes if "resource_tracker" not in " ".join(one.cmdline())]
        for one in forked:
            one.send_signal(signal.SIGUSR1)
        eventually(lambda: self.text.count("Current thread") >= len(forked), 5, "the stacks are written")
        return self.text

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def serving(self) -> bool:
        if self.host is not None:  # gRPC's threads are not on that host
            assert self.exitcode is None, self.text
            return any(" ready on " in line or line.endswith(" ready") for line in self.text.splitlines())
        with grpc.insecure_channel(self.address) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                assert self.exitcode is None, self.text
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def figure(self, name: str) -> float:
        """Return one of its metrics, summed over labels."""
        return total(self.metrics.removesuffix("/metrics"), name)


class Fleet:
    def __init__(self, scheduler: str, model: Path, log_dir: Path) -> None:
        self.scheduler = scheduler
        self.model = model
        self._log_dir = log_dir
        self.workers: list[Worker] = []

    def start(
        self,
        role: str,
        constants: Mapping[str, float] = _NONE,
        host: Host | None = None,
        **changes: dict[str, Any],
    ) -> Worker:
        """Start a worker or limb without waiting for it.

        constants: `module:NAME` -> value in its process; changes: settings by section.
        """
        name, address = f"{role}-{next(_names)}", host.address if host else LOOPBACK
        port, metrics_port = free_port(), free_port()
        settings: dict[str, Any] = {
            "engine": {
                "model": str(self.model),
                "served_model_name": "tiny",
                "dtype": "float32",
                "max_model_len": 4000,
                "max_num_batched_tokens": 256,
                "kv_cache_gib": 0.125,
            },
            "scheduler": {"address": self.scheduler},
            "worker": {
                "listen": f"{address}:{port}",
                "metrics_port": metrics_port,
                "worker_id": name,
                "drain_timeout_s": 20,
            },
            "handoff": {},
        }
        for section, values in changes.items():
            settings.setdefault(section, {}).update(values)
        process = zygote.shared().start(
            name,
            "harness.forked:run",
            self._log_dir,
            kind=role,
            settings=settings,
            unique=False,
            constants={**QUICK, **constants},
            host=host.pid if host else 0,
        )
        metrics = f"http://{address}:{metrics_port}/metrics"
        worker = Worker(name, process, settings["worker"]["listen"], metrics, self.scheduler, host)
        self.workers.append(worker)
        return worker

    def started(self, role: str, *, constants: Mapping[str, float] = _NONE, **changes: Any) -> Worker:
        worker = self.start(role, constants, **changes)
        try:
            eventually(worker.serving, START_TIMEOUT_S, f"{worker.name} serves")
        except AssertionError as error:
            raise AssertionError(f"{error}; its log and stacks:\n{worker.stacks()}") from None
        return worker


def wait_for(workers: Iterable[Worker], url: str) -> None:
    """Wait until the workers and the router at `url` serve."""
    for worker in workers:
        eventually(worker.serving, ALL_START_S, f"{worker.name} serves", every_s=0.2)
    eventually(lambda: status_of(f"{url}/health") == 200, ALL_START_S, "the router is ready", every_s=0.2)


@contextlib.contextmanager
def router(
    folder: Path,
    engine: dict[str, Any],
    scheduler: dict[str, Any],
    host: Host | None = None,
    constants: Mapping[str, float] = _NONE,
    **own: Any,
) -> Iterator[str]:
    """Start a router and yield its URL without waiting for it.

    constants: `module:NAME` -> value in its process; own: further settings of the `router` section.
    """
    port, address = free_port(), host.address if host else LOOPBACK
    settings = {
        "engine": engine,
        "scheduler": scheduler,
        "router": {"host": address, "port": port, **own},
        "security": {"insecure": host is not None},
    }
    arguments: dict[str, Any] = {"kind": "router", "settings": settings, "host": host.pid if host else 0}
    arguments["constants"] = dict(constants)
    process = zygote.shared().start("router", "harness.forked:run", folder, **arguments)
    try:
        yield f"http://{address}:{port}"
    finally:
        process.kill()
        process.wait(ALL_START_S)


@contextlib.contextmanager
def fleet(
    model: Path,
    log_dir: Path,
    scheduler_settings: Mapping[str, Any] = _NONE,
    host: Host | None = None,
) -> Iterator[Fleet]:
    """Run a scheduler and the workers that the test starts during the block.

    host: the scheduler's host, where this thread opens its sockets during the block.
    """
    address = f"{host.address if host else LOOPBACK}:{free_port()}"
    settings = {
        "scheduler": {**scheduler_settings, "address": address},
        "security": {"insecure": host is not None},
    }
    arguments: dict[str, Any] = {"kind": "scheduler", "settings": settings, "host": host.pid if host else 0}
    arguments["constants"] = QUICK
    scheduler = zygote.shared().start("scheduler", "harness.forked:run", log_dir, **arguments)
    one = Fleet(address, model, log_dir)
    try:
        with host.inside() if host else contextlib.nullcontext():
            yield one
    finally:
        end_all([worker.process for worker in one.workers], END_S)
        scheduler.kill()
