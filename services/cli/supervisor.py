"""Runs a whole deployment on one machine: starts the parts, restarts one that dies, ends them all.

Used by `baton up` (services/cli/up.py), which tells a person, and by offline use
(services/offline/supervised.py), which tells the Python process that asked for it.

vLLM is imported once and every engine process is forked from here: an import takes 6 to 11 s on a laptop
core, a fork nothing. For that this process stays free of threads, gRPC and CUDA (a small watcher process
asks the others how far they are).
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from baton import addresses
from baton.services import credentials, logs
from baton.services.cli import devices, processes
from baton.services.cli.processes import Child
from baton.services.cli.watch import Seen, watch
from baton.services.config import Settings
from baton.services.decode.proposers import validation
from baton.services.errors import ConfigError, StartError
from baton.services.leave import leave, on_signals
from baton.services.vllm_args import check_model, engine_args
from baton.services.vllm_frontend_args import check_names, frontend_namespace

READY_TIMEOUT_S = 600.0  # a large model loads for minutes; a small one is there in ten seconds
STILL_WAITING_S = 10.0
STOP_TIMEOUT_S = 15.0
MAX_RESTARTS = 3  # of one part; one that dies more often needs a person


@dataclass(frozen=True)
class Fleet:
    """How many workers of each role."""

    prefill: int
    decode: int
    mixed: int

    @property
    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["mixed"] * self.mixed

    def check(self) -> None:
        """Raises ConfigError when no request could ever be answered."""
        if self.mixed == 0 and (self.prefill == 0 or self.decode == 0):
            raise ConfigError(
                f"--prefill {self.prefill} --decode {self.decode} --mixed {self.mixed}: nobody could serve; "
                "start at least one of each role, or --mixed 1"
            )

    def __str__(self) -> str:
        counts = (("prefill", self.prefill), ("decode", self.decode), ("mixed", self.mixed))
        return " + ".join(f"{count} {role}" for role, count in counts if count)


class Report(Protocol):
    """Whom a supervisor tells what happens. Called in its process, in the order of the methods."""

    def begun(self, log_dir: Path) -> None:
        """All was checked; processes are started now."""

    def step(self, since_start_s: float, name: str, text: str) -> None:
        """Part `name` has come one step further, or has died and is started again."""

    def ready(self) -> None:
        """Everything answers. Called once."""

    def ending(self, drain_s: float) -> None:
        """The processes are asked to end; streams that run have so many seconds, 0 where there are none."""

    def ended(self) -> None:
        """No process is left."""


@dataclass
class Part:
    """One process that must run, and how to start it again."""

    name: str
    run: Callable[[], None]
    child: Child | None = None
    ready: bool = False
    restarts: int = 0
    proven: bool = False  # it was ready once: if it dies it is worth another start


@dataclass
class Supervisor:
    """Starts the parts, restarts one that dies (bounded), ends them all."""

    log_dir: Path
    report: Report
    drain_s: float = 0.0  # what streams that run are given at the end
    parts: list[Part] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, name: str, text: str) -> None:
        self.report.step(time.monotonic() - self.began, name, text)

    def start(self, part: Part) -> None:
        part.child = processes.spawn(part.name, part.run, self.log_dir)

    def reap(self) -> None:
        """Restart what died after it was ready; one that never was ends the start with its error."""
        for part in self.parts:
            child = part.child
            if child is None or child.alive:
                continue
            if not part.proven:
                raise StartError(f"{part.name} could not start: {child.last_error()} (log: {child.log})")
            if (
                child.left and part.ready
            ):  # a worker that was drained; what is started now waits to be undrained
                part.ready = False
                self.say(part.name, "ended as it was told; started again")
                self.start(part)
                continue
            if part.restarts >= MAX_RESTARTS:
                raise StartError(
                    f"{part.name} died {part.restarts + 1} times: {child.last_error()} (log: {child.log})"
                )
            part.restarts += 1
            part.ready = False
            self.say(
                part.name, f"died ({child.how_it_ended()}); restarting, {part.restarts} of {MAX_RESTARTS}"
            )
            self.start(part)

    def note(self, event: Seen) -> None:
        for part in self.parts:
            # A worker's id is its part's name and its process id: a new life has a new one.
            mine = event.name == part.name or event.name.startswith(f"{part.name}.")
            if mine and not part.ready:
                part.ready = part.proven = True
                self.say(part.name, f"ready: {event.detail}")

    @property
    def serves(self) -> bool:
        """Whether there may be streams that run."""
        return any(part.proven for part in self.parts if part.name == "router")

    @property
    def waiting_for(self) -> list[str]:
        return [part.name for part in self.parts if not part.ready]

    def stop(self) -> None:
        # The router first, so that no new work comes; the scheduler last, as the others report to it.
        children = [part.child for part in reversed(self.parts) if part.child]
        router, rest, scheduler = children[:1], children[1:-1], children[-1:]
        for group, more_s in ((router, self.drain_s), (rest, 0.0), (scheduler, 0.0)):
            timeout_s = more_s + STOP_TIMEOUT_S
            for child in processes.stop_all(group, timeout_s):
                self.say(child.name, f"did not end within {timeout_s:.0f} s: killed")


def supervise(
    settings: Settings, fleet: Fleet, log_dir: str, report: Report, owner: int | None = None
) -> None:
    """Start everything, wait, end everything. Returns when SIGINT or SIGTERM came, or the owner is gone.

    `owner` is a pidfd of a process: its death ends the deployment as a signal does. `log_dir` is made if it
    is not there; a new one is made where it is empty.
    Raises ConfigError and StartError with one line that says what to do; no process is left then either.
    """
    fleet.check()
    check_model(settings.engine)
    check_names(settings.router)
    validation.check(settings.engine)
    settings.scheduler.check_shared()
    credentials.check(settings)
    placed = devices.assign(len(fleet.roles), settings.engine.tensor_parallel_size)
    _check_port("router.port", settings.router.host, settings.router.port)
    _check_port("scheduler.address", *_scheduler_address(settings))
    folder = _log_folder(log_dir)
    supervisor = Supervisor(folder, report, settings.router.drain_timeout_s)
    stops: list[socket.socket | int] = [_wake_on_signals(), *([] if owner is None else [owner])]
    report.begun(folder)
    ours, theirs = Pipe(duplex=False)
    peers = settings.model_copy(deep=True)  # of who dials the scheduler, which may listen on all addresses
    peers.scheduler.address = addresses.from_here(settings.scheduler.address)
    health = f"{settings.router.url}/health"
    watcher = processes.spawn("watcher", lambda: watch(peers.scheduler.address, health, theirs), folder)

    def end() -> None:
        report.ending(settings.router.drain_timeout_s if supervisor.serves else 0.0)
        processes.stop_all([watcher], 1.0)
        supervisor.stop()

    try:
        _start_scheduler(supervisor, settings)
        if not Path(settings.engine.model).exists():
            supervisor.say("model", "no folder of this name is here: Hugging Face is asked for it")
        supervisor.say("engine", "loading the code; longest the first time")
        with _left_on_signals(stops, end, report.ended):
            _preload(settings)
            # What vLLM would refuse, before anybody loads a model.
            engine_args(settings.engine)
            frontend_namespace(settings.engine, settings.router)
        supervisor.say("engine", "code loaded")
        _start_engines(supervisor, peers, fleet, placed)
        _until_ready(supervisor, ours, stops)
        report.ready()
        _run(supervisor, ours, stops)
    except _Stopped:
        pass
    finally:
        end()
    report.ended()


class _Stopped(Exception):
    """A signal asked us to end, or nobody is left to serve."""


def _start_scheduler(supervisor: Supervisor, settings: Settings) -> None:
    from baton.services.cli.scheduler import run_scheduler

    scheduler = Part("scheduler", lambda: run_scheduler(settings))
    supervisor.parts.append(scheduler)
    supervisor.start(scheduler)


def _start_engines(
    supervisor: Supervisor, peers: Settings, fleet: Fleet, placed: list[devices.Devices]
) -> None:
    for number, (role, where) in enumerate(zip(fleet.roles, placed, strict=True)):
        name = f"{role}-{fleet.roles[:number].count(role)}"
        supervisor.parts.append(Part(name, _worker(peers, name, role, where)))
    supervisor.parts.append(Part("router", lambda: _run_router(peers)))
    for part in supervisor.parts[1:]:
        supervisor.start(part)
    supervisor.say("processes", "started; the engines load the model")


def _preload(settings: Settings) -> None:
    # What vLLM has to say of this machine it says again in each log.
    logs.configure(settings.log_format, "up")
    from baton.services.router import app
    from baton.services.worker import lifecycle

    lifecycle.preload()
    app.preload()


def _worker(settings: Settings, name: str, role: str, where: devices.Devices) -> Callable[[], None]:
    def run() -> None:
        from baton.services.worker.lifecycle import run_worker

        logs.keep_warnings()
        os.environ.update(where.environment)
        own = settings.model_copy(deep=True)
        own.worker.cpu = where.cpu
        own.worker.worker_id = f"{name}.{os.getpid()}"
        run_worker(own, role)

    return run


def _run_router(settings: Settings) -> None:
    from baton.services.router.app import run_router

    logs.keep_warnings()
    run_router(settings)
    leave(0)


@contextmanager
def _left_on_signals(
    stops: list[socket.socket | int], end: Callable[[], None], ended: Callable[[], None]
) -> Iterator[None]:
    """While nobody looks at `stops`, and nothing is forked, a signal's handler itself ends everything."""

    def end_at_once() -> None:
        for one in usual:  # a second one kills us, and the children with us
            signal.signal(one, signal.SIG_DFL)
        end()
        ended()
        leave(0)

    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    on_signals(end_at_once)
    if wait(stops, timeout=0):  # it came before
        raise _Stopped
    yield
    for number, handler in usual.items():
        signal.signal(number, handler)


def _until_ready(supervisor: Supervisor, events: Connection, stops: list[socket.socket | int]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    spoke = time.monotonic()
    while supervisor.waiting_for:
        readable = wait([events, *stops], timeout=0.2)
        if any(stop in readable for stop in stops):
            raise _Stopped
        if events in readable:
            supervisor.note(events.recv())
            spoke = time.monotonic()
        supervisor.reap()
        now = time.monotonic()
        if now > deadline:
            raise StartError(
                f"not ready after {READY_TIMEOUT_S:.0f} s: {', '.join(supervisor.waiting_for)}; see the logs"
            )
        if now - spoke > STILL_WAITING_S:
            supervisor.say("still", f"waiting for {', '.join(supervisor.waiting_for)}")
            spoke = now


def _run(supervisor: Supervisor, events: Connection, stops: list[socket.socket | int]) -> None:
    while True:
        sentinels = [part.child.process.sentinel for part in supervisor.parts if part.child]
        readable = wait([*stops, events, *sentinels])
        if any(stop in readable for stop in stops):
            raise _Stopped
        if events in readable:
            supervisor.note(events.recv())
        supervisor.reap()


def _wake_on_signals() -> socket.socket:
    """A socket that becomes readable when SIGINT or SIGTERM came; a second one kills us and the children."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def on_signal(number: int, frame: object) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        writing.send(b"x")

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    return reading


def _scheduler_address(settings: Settings) -> tuple[str, int]:
    try:
        return addresses.split(settings.scheduler.address)
    except ValueError as error:
        raise ConfigError(f"scheduler.address: {error}") from None


def _check_port(key: str, host: str, port: int) -> None:
    if port == 0:
        raise ConfigError(f"{key}: port 0 is not allowed here, as the parts must find each other; choose one")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family):
            return
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            where = key.replace("router.port", "router.host")
            raise StartError(f"{where}: cannot listen on {host}: this machine has no such address") from None
        # Not its own text, which repeats the address as a tuple.
        raise StartError(
            f"{key}: cannot listen on {addresses.join(host, port)}: {os.strerror(error.errno or 0)}; "
            "choose another port or end who uses it"
        ) from None


def _log_folder(given: str) -> Path:
    folder = Path(given) if given else Path(tempfile.mkdtemp(prefix="baton-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "watcher.log").touch()
    except OSError as error:
        raise ConfigError(
            f"--log-dir {given}: cannot write there: {error.strerror}; choose another folder"
        ) from None
    return folder
