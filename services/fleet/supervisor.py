"""Supervise a deployment on one machine: start its parts, keep them running and stop them all.

`baton up` (services/cli/up.py) runs it in a terminal, offline use (services/offline/supervised.py) for
another Python process.

vLLM is imported once and every engine process is forked from here, because an import takes 6 to 11 s on a
laptop core (processes.py names the exception). So this process must stay free of threads, gRPC and CUDA; a
small watcher process (watch.py) finds out which parts are ready.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote

from baton import addresses
from baton.home import expanded
from baton.security.names import Role
from baton.services import credentials, identities, roles
from baton.services.config import Settings
from baton.services.decode.proposers import validation
from baton.services.engine.args import check_model, engine_args
from baton.services.errors import ConfigError, StartError
from baton.services.fleet import children
from baton.services.fleet.parts import Kind, Parts
from baton.services.fleet.places import Places, Plan, places_of
from baton.services.fleet.ports import check_port
from baton.services.fleet.signals import Stopped, left_on_signals, wake_on_signals
from baton.services.fleet.watch import Ordered, Watched, scheduler_names, watch
from baton.services.models import Model, models_of
from baton.services.router.vllm.frontend_args import check_names, frontend_namespace

READY_TIMEOUT_S = 1800.0  # a gang may wait ten minutes for its members, then load for many
STILL_WAITING_S = 10.0

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Fleet:
    prefill: int
    decode: int
    mixed: int
    schedulers: int = 1
    encode: int = 0

    @classmethod
    def of(
        cls, prefill: int | None, decode: int | None, mixed: int, schedulers: int = 1, encode: int = 0
    ) -> Fleet:
        """Return a fleet; without mixed workers, it has one prefill and one decode worker by default."""
        alone = 0 if mixed else 1
        return cls(
            alone if prefill is None else prefill,
            alone if decode is None else decode,
            mixed,
            schedulers,
            encode,
        )

    @property
    def roles(self) -> list[str]:
        return [role for role, count in self._counts for _ in range(count)]

    @property
    def _counts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("mixed", self.mixed),
            ("encode", self.encode),
        )

    @property
    def hands_over(self) -> bool:
        """Whether any worker could need another's KV: mixed workers alone do not."""
        return bool(self.prefill or self.decode)

    def check(self) -> None:
        """Raise ConfigError if these workers could not serve a request."""
        if self.mixed == 0 and (self.prefill == 0 or self.decode == 0):
            raise ConfigError(
                f"--prefill {self.prefill} --decode {self.decode} --mixed {self.mixed} cannot serve: "
                "start at least one prefill and one decode worker, or --mixed 1"
            )

    def __str__(self) -> str:
        workers = " + ".join(f"{count} {role}" for role, count in self._counts if count)
        return f"{workers}, {self.schedulers} schedulers" if self.schedulers > 1 else workers


@dataclass(frozen=True)
class Started:
    """A model of the deployment, and its workers."""

    model: Model
    fleet: Fleet

    @property
    def schedulers(self) -> list[str]:
        return [one.strip() for one in self.model.settings.scheduler.address.split(",")]


def started(settings: Settings, fleet: Fleet | None) -> list[Started]:
    """Return the models to start. Raises ConfigError.

    `fleet` comes from the command line. With several models, the configuration must have the numbers instead.
    """
    if settings.models and fleet is not None:
        raise ConfigError(
            "the configuration has several models: set the numbers of workers in models.NAME.workers, "
            "and name schedulers in models.NAME.scheduler.address"
        )
    return [_started(one, fleet) for one in models_of(settings)]


def _started(model: Model, fleet: Fleet | None) -> Started:
    if (entry := model.entry) is None:
        return Started(model, fleet or Fleet.of(None, None, 0))
    schedulers = len(model.settings.scheduler.address.split(","))
    own = entry.workers
    fleet = Fleet.of(
        own.get("prefill"), own.get("decode"), own.get("mixed", 0), schedulers, own.get("encode", 0)
    )
    return Started(model, fleet)


def _check(settings: Settings, whole: Sequence[Started]) -> None:
    """Check what can be checked before anything starts; set the schedulers' addresses.

    Raises ConfigError and StartError.
    """
    for one in whole:
        try:
            _check_model(one)
        except (ConfigError, StartError) as error:
            if one.model.entry is None:
                raise
            raise type(error)(f"models.{one.model.name}: {error}") from None
    credentials.check(settings)
    if settings.security.folder:
        raise ConfigError("security.folder is for one process: leave it out where several are started")
    check_port("router.port", settings.router.host, settings.router.port)
    for one in whole:
        for address in one.schedulers:
            check_port("scheduler.address", *addresses.split(address))


def _check_model(one: Started) -> None:
    """Check one model and set its schedulers' addresses. Raises ConfigError and StartError."""
    settings, fleet = one.model.settings, one.fleet
    fleet.check()
    check_names(settings.router)
    plan = Plan(settings, fleet.roles)
    engines = [settings.engine]
    for role in {*fleet.roles, *filter(None, plan.further())}:
        roles.check(roles.role(role), own := plan.settings_of(role))
        engines.append(own.engine)
    if settings.fleet.node_rank:
        raise ConfigError(
            f"fleet.node_rank (value {settings.fleet.node_rank}): `baton up` runs machine 0: on others say "
            "`baton node`"
        )
    for engine in engines:
        check_model(engine)
        validation.check(engine)
    settings.scheduler.check_shared(fleet.schedulers)
    identities.check(settings)
    if settings.autoscale.mode == "roles" and Plan(settings, fleet.roles).sides_differ:
        raise ConfigError("autoscale.mode is roles: leave out fleet.engines")
    if settings.autoscale.mode in ("advise", "on") and fleet.mixed:
        raise ConfigError("autoscale.mode: mixed workers are not scaled; leave out --mixed, or the mode")
    if any(engine.nodes > 1 for engine in engines):
        _check_machines(one)
    settings.scheduler.address = ",".join(scheduler_addresses(settings, fleet.schedulers))


def _check_machines(one: Started) -> None:
    """Refuse settings with which gangs cannot form across machines. Raises ConfigError."""
    settings = one.model.settings
    if settings.autoscale.mode == "on":
        raise ConfigError(
            "engine.nodes is above 1, and the other machines get no orders: leave out autoscale.mode"
        )
    if settings.worker.gang or one.model.entry is not None:
        given = f"worker.gang (value {settings.worker.gang!r})" if settings.worker.gang else "several models"
        raise ConfigError(
            f"engine.nodes is above 1 with {given}: `baton up` names gangs in its own way, so the other "
            "machines would not find them: run a scheduler, a router, and `baton node` on all machines"
        )


def supervise(
    settings: Settings, fleet: Fleet | None, log_dir: str, tell: Tell, owner: int | None = None
) -> None:
    """Run a deployment until SIGINT, SIGTERM, SIGHUP or the owner's death; return when it has stopped.

    `tell` is called with events, in this order:

        begun   log_dir    the checks have passed, and processes are being started
        step    since_start_s, name, text    of a part: a step of its start, a death, a restart
        ready              every part is ready; once
        ending  drain_s    everything is being stopped; running streams have this long
        ended              no process is left

    `fleet`: the workers; None for those of the configuration. `owner`: a pidfd; the death of its process ends
    the deployment like a signal. `log_dir`: created if missing; "" for a new temporary folder. Raises
    ConfigError and StartError; no process is left then, either.
    """
    whole = started(settings, fleet)
    _check(settings, whole)
    folder = log_folder(log_dir)
    if settings.security.tls and not settings.security.join:
        from baton.security.authority import Authority

        Authority.at(expanded(settings.security.ca, "security.ca"))  # the parts' certificates come from it
    stops: list[socket.socket | int] = [wake_on_signals(), *([] if owner is None else [owner])]
    tell({"event": "begun", "log_dir": str(folder)})
    _Supervisor(settings, whole, folder, tell, stops).run()


class _Supervisor:
    def __init__(
        self,
        settings: Settings,
        whole: Sequence[Started],
        folder: Path,
        tell: Tell,
        stops: list[socket.socket | int],
    ) -> None:
        """Plan the parts of `whole`. Raises ConfigError and StartError."""
        self._settings = settings
        self._whole = whole
        self._tell = tell
        self._stops = stops
        self._began = time.monotonic()
        self._parts = Parts(folder, self._say)
        self._peers = [_peers(one) for one in whole]
        plans = [
            Plan(peer.settings, one.fleet.roles, peer.prefix)
            for peer, one in zip(self._peers, whole, strict=True)
        ]
        found = places_of(plans, lambda own: partial(children.Worker, own), settings.fleet.devices)
        self._places = {one.prefix: each for one, each in zip(plans, found, strict=True)}
        # The watcher and its successors share one pipe: messages are small enough to be written atomically.
        self._events, self._watchers_end = Pipe(duplex=False)

    def run(self) -> None:
        """Start everything, keep it running until a signal, and stop it."""
        try:
            self._start()
            self._until_ready()
            self._tell({"event": "ready"})
            while True:
                self._wait()
        except Stopped:
            pass
        finally:
            self._end()
        self._tell({"event": "ended"})

    def _say(self, name: str, text: str) -> None:
        since_s = time.monotonic() - self._began
        self._tell({"event": "step", "since_start_s": since_s, "name": name, "text": text})

    def _end(self) -> None:
        drain_s = self._settings.router.drain_timeout_s if self._parts.serve else 0.0
        self._parts.stop(drain_s, told=lambda: self._tell({"event": "ending", "drain_s": drain_s}))

    def _start(self) -> None:
        parts, settings = self._parts, self._settings
        watched = [_watched(settings, peer, self._places[peer.prefix]) for peer in self._peers]
        parts.add("watcher", Kind.WATCHER, partial(_watch, settings, watched, self._watchers_end))
        for one in self._whole:
            _start_schedulers(parts, one)
            model = one.model.settings.engine.model
            if not Path(model).exists():
                self._say("model", f"there is no folder {model}: it is fetched from Hugging Face")
        self._say("engine", "importing vLLM; the first time takes longest")
        with left_on_signals(self._stops, self._end, lambda: self._tell({"event": "ended"})):
            children.preload(settings, "up")
            # Raises for arguments that vLLM refuses, before a model is loaded.
            for peer in self._peers:
                engine_args(peer.settings.engine)
                frontend_namespace(peer.settings.engine, peer.settings.router)
        self._say("engine", "vLLM imported")
        for each in self._places.values():
            each.start(parts)
        parts.add("router", Kind.ROUTER, partial(children.router, settings, self._peers))
        self._say("processes", "started; the engines load the model")

    def _until_ready(self) -> None:
        parts, spoke = self._parts, time.monotonic()
        deadline, waited_for = spoke + READY_TIMEOUT_S, parts.waiting_for
        while parts.waiting_for:
            self._wait(0.2)
            now, names = time.monotonic(), ", ".join(parts.waiting_for)
            if now > deadline:
                raise StartError(f"not ready after {READY_TIMEOUT_S:.0f} s: {names}; see the logs")
            if parts.waiting_for != waited_for:
                spoke, waited_for = now, parts.waiting_for
            if now - spoke > STILL_WAITING_S:
                self._say("still", f"waiting for {names}{parts.last_words}")
                spoke = now

    def _wait(self, at_most_s: float | None = None) -> None:
        """Wait for one event and handle it. Raises Stopped, and StartError if nothing can serve."""
        readable = self._parts.wait([*self._stops, self._events], at_most_s)
        if any(stop in readable for stop in self._stops):
            raise Stopped
        if self._events in readable:
            event = self._events.recv()
            if isinstance(event, Ordered):
                self._places[event.prefix].obey(event, self._parts)
            else:
                self._parts.note(event)
        self._parts.reap()


def _peers(one: Started) -> Model:
    """Return the model with schedulers' addresses that clients can dial, as none can dial a wildcard."""

    def seen(settings: Settings) -> Settings:
        peers = settings.model_copy(deep=True)
        peers.scheduler.address = ",".join(map(addresses.from_here, one.schedulers))
        if peers.handoff.enabled is None:
            # `baton node`, which runs the rest of a gang, does not know the whole fleet.
            peers.handoff.enabled = one.fleet.hands_over or peers.engine.nodes > 1
        return peers

    return one.model.with_settings(seen)


def _watched(settings: Settings, peer: Model, places: Places) -> Watched:
    health = f"{settings.router.url}/health"
    if len(settings.models) > 1:
        health += f"?model={quote(peer.name, safe='')}"
    chosen = peer.settings.autoscale.mode == "on"
    return Watched(peer.settings.scheduler.address, health, peer.prefix, places.owners if chosen else {})


def _watch(settings: Settings, watched: Sequence[Watched], events: Connection) -> None:
    identities.take_on(settings, Role.OPERATOR)
    watch(watched, settings.router.url, events)


def scheduler_addresses(settings: Settings, number: int) -> list[str]:
    """Return where the schedulers listen: the given addresses, or the given one and the ports after it.

    Raises ConfigError.
    """
    given = [one.strip() for one in settings.scheduler.address.split(",")]
    try:
        host, port = addresses.split(given[0])
    except ValueError as error:
        raise ConfigError(f"scheduler.address: {error}") from None
    if len(given) == number:
        return given
    if len(given) > 1:
        raise ConfigError(
            f"scheduler.address names {len(given)} schedulers and --schedulers is {number}: name as many, or "
            "only the first one"
        )
    return [addresses.join(host, port + one) for one in range(number)]


def _start_schedulers(parts: Parts, one: Started) -> None:
    """Start a model's scheduler at each address; fixed ports of their metrics are consecutive."""
    for number, name in enumerate(scheduler_names(len(one.schedulers), one.model.prefix)):
        own = one.model.settings.model_copy(deep=True)
        own.scheduler.address = one.schedulers[number]
        own.scheduler.metrics_port += number if own.scheduler.metrics_port else 0
        parts.add(name, Kind.SCHEDULER, partial(children.scheduler, own))


def log_folder(given: str) -> Path:
    """Return the folder for logs, created if missing; "" means a new temporary one.

    Raises ConfigError.
    """
    folder = Path(given) if given else Path(tempfile.mkdtemp(prefix="baton-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "watcher.log").touch()
    except OSError as error:
        raise ConfigError(
            f"--log-dir {given}: cannot write there: {error.strerror}; choose another folder"
        ) from None
    return folder
