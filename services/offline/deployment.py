"""A private deployment, which ends when the process that owns it does, even if that process is killed."""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self, cast

from pydantic import SecretStr

from baton.services.config import Settings
from baton.services.engine.args import check_model, served_model_name
from baton.services.errors import ConfigError, ServiceError, StartError
from baton.services.fleet.endings import ending
from baton.services.fleet.parts import STOP_TIMEOUT_S
from baton.services.fleet.ports import reserved
from baton.services.fleet.processes import end_supervisor, start_supervisor
from baton.services.fleet.supervisor import READY_TIMEOUT_S, Fleet
from baton.services.offline.client import json_object
from baton.services.offline.errors import DeploymentEnded
from baton.services.offline.supervised import Order
from baton.services.printing import complain, step

_START_S = READY_TIMEOUT_S + 60.0  # more than the supervisor's own limit, whose error says more
_STOP_S = 3 * STOP_TIMEOUT_S + 10.0  # the supervisor stops three groups of processes one after another
_ERRORS: dict[str, type[ServiceError]] = {"ConfigError": ConfigError}
_HOST = "127.0.0.1"

Event = dict[str, Any]
Tell = Callable[[str], None]


class OwnDeployment:
    """A scheduler, workers and a router on free loopback ports, with a random API key.

    The processes are those of `baton up`. Port, scheduler address, store and key are chosen here, whatever
    the configuration says, so another deployment with the same file can run at the same time. `tell` is
    called with a line for each step of the start, and later, from a thread, for each part that dies or is
    restarted.

    Raises ConfigError or StartError if the deployment cannot start; no process is left then.
    """

    def __init__(self, settings: Settings, fleet: Fleet, *, log_dir: str = "", tell: Tell) -> None:
        fleet.check()
        check_model(settings.engine)
        self.model = served_model_name(settings.engine)
        self.api_key = secrets.token_urlsafe(24)
        self._tell = tell
        self.owner = os.getpid()
        self._reason = ""  # why it failed
        self._closed = False
        self._ports = [reserved(_HOST), reserved(_HOST)]
        router, scheduler = (port.getsockname()[1] for port in self._ports)
        self.url = f"http://{_HOST}:{router}"
        self.scheduler_address = f"{_HOST}:{scheduler}"
        self._temporary = not log_dir
        self.log_dir = Path(log_dir or tempfile.mkdtemp(prefix="baton-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._process = self._start(Order.of(self._private(settings), fleet, self.log_dir))
        self._reader = threading.Thread(target=self._read, name="baton deployment", daemon=True)
        self._reader.start()
        try:
            self._until_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the supervisor, the parent of the deployment's processes."""
        return self._process.pid

    def check(self) -> None:
        if self._closed:
            raise DeploymentEnded("the deployment was closed")
        if self._reason or self._process.poll() is not None:
            raise DeploymentEnded(f"the deployment has ended: {self._why()}")

    def close(self) -> None:
        """Stop all processes and wait for their end. Idempotent. Keeps the logs after a failure."""
        if self._closed or os.getpid() != self.owner:  # a fork of the owner is not the owner
            return
        self._closed = True
        end_supervisor(self._process, _STOP_S)
        self._reader.join(5.0)
        for port in self._ports:
            port.close()
        if self._temporary and not self._reason:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def _private(self, settings: Settings) -> Settings:
        own = settings.model_copy(deep=True)
        own.router.host, own.router.port = _HOST, int(self.url.rpartition(":")[2])
        own.router.keys_file = own.router.keys_store = ""
        own.router.api_key = SecretStr(self.api_key)
        own.scheduler.address = self.scheduler_address
        own.scheduler.store = "memory"  # others would place requests on it through a shared store
        own.scheduler.metrics_port = own.worker.metrics_port = own.router.metrics_port = 0
        return own

    def _start(self, order: Order) -> subprocess.Popen[str]:
        process = start_supervisor("baton.services.offline.supervised", log=self.log_dir / "supervisor.log")
        stdin = cast(IO[str], process.stdin)
        with suppress(BrokenPipeError):  # it has exited, which the reader will notice
            stdin.write(order.to_json())
            stdin.close()
        return process

    def _read(self) -> None:
        try:
            with cast(IO[str], self._process.stdout) as events:
                self._follow(events)
        finally:
            self._events.put(None)  # wakes `_until_ready`

    def _follow(self, events: IO[str]) -> None:
        ready = False
        for line in events:
            event = json_object(line)
            if event is None or "event" not in event:
                continue  # printed by a library before stdout was redirected
            if event["event"] == "failed":
                self._reason = event["text"]
            if not ready:
                self._events.put(event)
            elif event["event"] == "step" and not self._closed:
                self._pass_on(event)
            ready = ready or event["event"] == "ready"

    def _pass_on(self, event: Event) -> None:
        """Call `tell`, which may raise anything; this thread must continue to read."""
        try:
            self._tell(_text(event))
        except Exception as error:  # noqa: BLE001 (there is no caller to raise it to)
            complain(f"{_text(event)} (not passed on: {type(error).__name__}: {error})")

    def _until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise StartError(
                    f"not ready after {_START_S:.0f} s; see the logs in {self.log_dir}"
                ) from None
            if event is None:
                with suppress(subprocess.TimeoutExpired):  # waits for its exit status
                    self._process.wait(5.0)
                self._reason = self._why()
                raise StartError(f"the deployment could not start: {self._reason}")
            if event["event"] == "failed":
                raise _ERRORS.get(event["kind"], StartError)(event["text"])
            if event["event"] == "step":
                self._tell(_text(event))
            if event["event"] == "ready":
                return

    def _why(self) -> str:
        if self._reason:
            return self._reason
        how = ending(self._process.returncode)
        return f"its supervisor ended with {how}; see the logs in {self.log_dir}"


def _text(event: Event) -> str:
    return step(event["since_start_s"], event["name"], event["text"])
