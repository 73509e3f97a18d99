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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from urllib.parse import quote

from baton import addresses
from baton.home import expanded
from baton.security.names import Role
from baton.services import credentials, identities, printing, roles
from baton.services.config import Settings
from baton.services.decode.proposers import validation
from baton.services.engine.args import check_model, engine_args
from baton.services.errors import ConfigError, StartError
from baton.services.fleet import children
from baton.services.fleet.goals import goals_of
from baton.services.fleet.parts import Kind, Parts, Say
from baton.services.fleet.places import Places, Plan, places_of
from baton.services.fleet.ports import check_port
from baton.services.fleet.signals import Stopped, left_on_signals, wake_on_signals
from baton.services.fleet.watch import Ordered, Watched, scheduler_names, watch
from baton.services.models import Model, models_of
from baton.services.router.vllm.frontend_args import check_names, frontend_namespace

READY_TIMEOUT_S = 600.0  # a large model loads for minutes, a small one for ten seconds
STILL_WAITING_S = 10.0

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Fleet:
    prefill: int
    decode: int
    mixed: int
    schedulers: int = 1

    @classmethod
    def of(cls, prefill: int | None, decode: int | None, mixed: int, schedulers: int = 1) -> Fleet:
        """Return a fleet; with no numbers given, it has one prefill and one decode worker."""
        alone = 0 if mixed else 1
        return cls(
            alone if prefill is None else prefill, alone if decode is None else decode, mixed, schedulers
        )

    @property
    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["mixed"] * self.mixed

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
        counts = (("prefill", self.prefill), ("decode", self.decode), ("mixed", self.mixed))
        workers = " + ".join(f"{count} {role}" for role, count in counts if count)
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
            "the configuration has several models: set the numbers of workers there, as models.NAME.prefill, "
            "decode and mixed, and name schedulers in models.NAME.scheduler.address"
        )
    return [_started(one, fleet) for one in models_of(settings)]


def _started(model: Model, fleet: Fleet | None) -> Started:
    if (entry := model.entry) is None:
        return Started(model, fleet or Fleet.of(None, None, 0))
    schedulers = len(model.settings.scheduler.address.split(","))
    return Started(model, Fleet.of(entry.prefill, entry.decode, entry.mixed, schedulers))


def _check(settings: Settings, whole: Sequence[Started]) -> None:
    """Check what can be checked before anything starts; set the schedulers' addresses.

    Raises ConfigError and StartError.
    """
    for one in whole:
        try:
            _check_model(one.model.settings, one.fleet)
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


def _check_model(settings: Settings, fleet: Fleet) -> None:
    """Check one model and set its schedulers' addresses. Raises ConfigError and StartError."""
    fleet.check()
    check_names(settings.router)
    shapes = [settings, *(Plan(settings, fleet.roles).settings_of(role) for role in set(fleet.roles))]
    for role in fleet.roles:
        roles.check(roles.role(role), settings)
    for one in shapes:
        check_model(one.engine)
        validation.check(one.engine)
    settings.scheduler.check_shared(fleet.schedulers)
    identities.check(settings)
    if goals_of(settings).mode != "off" and fleet.mixed:
        raise ConfigError("autoscale.mode: mixed workers are not scaled; leave out --mixed, or the mode")
    changes = settings.scheduler.rebalance_after_s or settings.autoscale.mode == "on"
    if changes and any(one.engine.data_parallel_size > 1 for one in shapes):
        raise ConfigError(
            "engine.data_parallel_size is above 1, and gangs are neither scaled nor do they change roles: "
            "leave out autoscale.mode and scheduler.rebalance_after_s"
        )
    settings.scheduler.address = ",".join(scheduler_addresses(settings, fleet.schedulers))


def supervise(
    settings: Settings, fleet: Fleet | None, log_dir: str, tell: Tell, owner: int | None = None
) -> None:
    """Run a deployment until SIGINT, SIGTERM, SIGHUP or the owner's death; return when it has stopped.

    `tell` is called with events, in this order:

        begun   log_dir    the checks have passed, and processes are being started
        step    since_start_s, name, text    of a part: a step of its start, a death, a restart
        ready              every part is ready; once
        ending  drain_s    all is being stopped; running streams have this long
        ended              no process is left

    `fleet`: its workers; None for those of the configuration. `owner`: a pidfd; the death of its process ends
    the deployment like a signal. `log_dir`: created if missing; "" for a new temporary folder. Raises
    ConfigError and StartError; no process is left then, either.
    """
    whole = started(settings, fleet)
    _check(settings, whole)
    folder = log_folder(log_dir)
    began = time.monotonic()

    def say(name: str, text: str) -> None:
        tell({"event": "step", "since_start_s": time.monotonic() - began, "name": name, "text": text})

    parts = Parts(folder, say)
    if settings.security.tls and not settings.security.join:
        from baton.security.authority import Authority

        Authority.at(expanded(settings.security.ca, "security.ca"))  # the parts' certificates come from it
    stops: list[socket.socket | int] = [wake_on_signals(), *([] if owner is None else [owner])]
    tell({"event": "begun", "log_dir": str(folder)})
    # The watcher and its successors share one pipe: messages are small enough to be written atomically.
    ours, theirs = Pipe(duplex=False)
    peers = [_peers(one) for one in whole]
    plans = [
        Plan(peer.settings, one.fleet.roles, peer.prefix) for peer, one in zip(peers, whole, strict=True)
    ]
    found = places_of(plans, lambda own: partial(children.Worker, own), settings.fleet.devices)
    places = {one.prefix: each for one, each in zip(plans, found, strict=True)}
    watched = [_watched(settings, peer, places[peer.prefix]) for peer in peers]

    def end() -> None:
        drain_s = settings.router.drain_timeout_s if parts.serve else 0.0
        parts.stop(drain_s, told=lambda: tell({"event": "ending", "drain_s": drain_s}))

    def ended() -> None:
        tell({"event": "ended"})

    try:
        parts.add("watcher", Kind.WATCHER, partial(_watch, settings, watched, theirs))
        for one in whole:
            own = one.model
            _start_schedulers(parts, one)
            if not Path(own.settings.engine.model).exists():
                say(
                    "model",
                    f"there is no folder {own.settings.engine.model}: it is fetched from Hugging Face",
                )
        say("engine", "importing vLLM; the first time takes longest")
        with left_on_signals(stops, end, ended):
            children.preload(settings, "up")
            # Raises for arguments that vLLM refuses, before a model is loaded.
            for peer in peers:
                engine_args(peer.settings.engine)
                frontend_namespace(peer.settings.engine, peer.settings.router)
        say("engine", "vLLM imported")
        for each in places.values():
            each.start(parts)
        parts.add("router", Kind.ROUTER, partial(children.router, settings, peers))
        say("processes", "started; the engines load the model")
        _until_ready(parts, places, say, ours, stops)
        tell({"event": "ready"})
        while True:
            _wait(parts, places, ours, stops)
    except Stopped:
        pass
    finally:
        end()
    ended()


def _peers(one: Started) -> Model:
    """Return the model with schedulers' addresses that clients can use: one may listen on all addresses."""

    def seen(settings: Settings) -> Settings:
        peers = settings.model_copy(deep=True)
        peers.scheduler.address = ",".join(map(addresses.from_here, one.schedulers))
        if peers.handoff.enabled is None:
            peers.handoff.enabled = one.fleet.hands_over
        return peers

    return one.model.with_settings(seen)


def _watched(settings: Settings, peer: Model, places: Places) -> Watched:
    health = f"{settings.router.url}/health"
    if len(settings.models) > 1:
        health += f"?model={quote(peer.name, safe='')}"
    chosen = peer.settings.autoscale.mode == "on"
    return Watched(peer.settings.scheduler.address, health, peer.prefix, places.names if chosen else ())


def _watch(settings: Settings, watched: Sequence[Watched], events: Connection) -> None:
    identities.take_on(settings, Role.OPERATOR)
    watch(watched, settings.router.url, events)


def _until_ready(
    parts: Parts,
    places: Mapping[str, Places],
    say: Say,
    events: Connection,
    stops: list[socket.socket | int],
) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    spoke, waited_for = time.monotonic(), parts.waiting_for
    while parts.waiting_for:
        _wait(parts, places, events, stops, 0.2)
        now = time.monotonic()
        if now > deadline:
            raise StartError(
                f"not ready after {READY_TIMEOUT_S:.0f} s: {', '.join(parts.waiting_for)}; see the logs"
            )
        if parts.waiting_for != waited_for:
            spoke, waited_for = now, parts.waiting_for
        if now - spoke > STILL_WAITING_S:
            say("still", f"waiting for {', '.join(parts.waiting_for)}{parts.last_words}")
            spoke = now


def _wait(
    parts: Parts,
    places: Mapping[str, Places],
    events: Connection,
    stops: list[socket.socket | int],
    at_most_s: float | None = None,
) -> None:
    """Wait for one event and handle it. Raises Stopped, and StartError if nothing can serve."""
    due = (at_most_s, parts.next_start_s, printing.catch_up())
    limits = [seconds for seconds in due if seconds is not None]
    readable = wait([*stops, events, *parts.sentinels], timeout=min(limits, default=None))
    if any(stop in readable for stop in stops):
        raise Stopped
    if events in readable:
        event = events.recv()
        if isinstance(event, Ordered):
            places[event.prefix].obey(event, parts)
        else:
            parts.note(event)
    parts.reap()


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
