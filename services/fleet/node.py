"""Run one machine's parts of a larger deployment: `baton node`.

Like `baton up` it imports vLLM once, forks every part and restarts those that die, so it has no threads and
no gRPC. It talks to its owner over stdin and stdout: pipes need neither, and close if the owner dies.

    stdin   each line is a JSON list of all parts to run, each with the fields of `PartOrder`. Parts that are
            no longer listed are drained. Running parts continue; a worker whose role has changed gets the new
            one at its next start.
    stdout  a line of JSON for each event: {"event": "said", "name": ..., "text": ...}, and after each change
            {"event": "parts", "states": {name: running | restarting | leaving | given up}}

The end of stdin means that the owner is dead: all parts are killed, because other parts will replace them.
SIGTERM, SIGINT and SIGHUP drain them.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from baton.services.config import Settings
from baton.services.fleet import children
from baton.services.fleet.devices import Cores, Devices, cpu_build
from baton.services.fleet.parts import STOP_TIMEOUT_S, Kind, Parts
from baton.services.fleet.signals import Stopped, left_on_signals, wake_on_signals
from baton.services.leave import leave

Tell = Callable[[dict[str, Any]], None]
_ROUTER, _SCHEDULER = "router", "scheduler"
_STDIN = 0
_CHUNK = 1 << 16  # bytes


@dataclass(frozen=True)
class PartOrder:
    name: str  # unique on the machine; a worker's name in the whole deployment, as drains apply to names
    role: str  # a worker's role, or router, or scheduler
    settings: Mapping[str, Any]  # the whole tree, secrets included
    environment: Mapping[str, str] = field(default_factory=dict)  # such as CUDA_VISIBLE_DEVICES
    cores: int = 0  # number of cores to pin it to, if vLLM runs on the CPU; 0: do not pin

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @functools.cached_property
    def tree(self) -> Settings:
        return Settings(**self.settings)

    @property
    def kind(self) -> Kind:
        return {_ROUTER: Kind.ROUTER, _SCHEDULER: Kind.SCHEDULER}.get(self.role, Kind.WORKER)

    @property
    def end_s(self) -> float:
        """The seconds that the part has to drain and exit."""
        drains = {
            Kind.WORKER: self.tree.worker.drain_timeout_s,
            Kind.ROUTER: self.tree.router.drain_timeout_s,
        }
        return drains.get(self.kind, 0.0) + STOP_TIMEOUT_S


def run_node(orders: Sequence[PartOrder], log_dir: Path, tell: Tell, *, listen: bool) -> None:
    """Run `orders` until a signal, then drain all parts. `listen`: take new orders from stdin.

    `tell` is called with each event. A process is restarted three times within ten minutes, then given up.
    """
    _Node(log_dir, tell, listen=listen).run(orders)


class _Node:
    def __init__(self, log_dir: Path, tell: Tell, *, listen: bool) -> None:
        self._tell = tell
        self._listen = listen
        self._parts = Parts(log_dir, self._say, whole=False)
        self._stop = wake_on_signals()
        self._wanted: dict[str, PartOrder] = {}
        self._running: dict[str, PartOrder] = {}  # including draining ones
        self._cores = Cores()
        self._lent: dict[str, str] = {}
        self._preloaded: set[Kind] = {Kind.SCHEDULER}  # needs no vLLM
        self._line = b""  # the beginning of the next line
        self._told: dict[str, str] = {}

    def _say(self, name: str, text: str) -> None:
        self._tell({"event": "said", "name": name, "text": text})

    def run(self, orders: Sequence[PartOrder]) -> None:
        self._wanted = {one.name: one for one in orders}
        try:
            while True:
                self._reconcile()
                self._wait()
        except Stopped:
            self._end()

    def _wait(self) -> None:
        """Wait for one event and handle it. Raises Stopped."""
        readable = self._parts.wait([self._stop, *([_STDIN] if self._listen else [])])
        if self._stop in readable:
            raise Stopped
        if _STDIN in readable:
            self._read()
        self._parts.reap()

    def _read(self) -> None:
        chunk = os.read(_STDIN, _CHUNK)
        if not chunk:
            leave(1)  # the kernel kills the children with this process
        *lines, self._line = (self._line + chunk).split(b"\n")
        if lines:
            self._wanted = {one["name"]: PartOrder(**one) for one in json.loads(lines[-1])}

    def _reconcile(self) -> None:
        members = {part.name: part for part in self._parts.members}
        for name in self._running.keys() - members.keys():  # the part has left
            del self._running[name]
            self._cores.take_back(self._lent.pop(name, ""))
        for name, part in members.items():
            if name not in self._wanted and part.leaves_by is None:
                self._parts.retire(part, self._running[name].end_s)
        new = [one for name, one in self._wanted.items() if name not in members]
        for one in sorted(new, key=lambda one: one.kind not in self._preloaded):
            if one.kind not in self._preloaded:
                self._preload(one.tree, {each.kind for each in new})
                if self._listen and wait([_STDIN], timeout=0):
                    self._read()
                self._reconcile()  # orders may have changed during the import
                return
            self._add(one)
        states = {part.name: part.state for part in self._parts.members}
        if states != self._told:
            self._tell({"event": "parts", "states": states})
            self._told = states

    def _add(self, one: PartOrder) -> None:
        self._running[one.name] = one
        gang = one.tree.worker.gang_name if one.kind is Kind.WORKER else ""
        self._parts.add(one.name, one.kind, self._work(one), gang=gang)
        self._say(one.name, "started")

    def _preload(self, settings: Settings, kinds: set[Kind]) -> None:
        self._say("engine", "importing vLLM; the first time takes longest")
        began = time.monotonic()
        with left_on_signals([self._stop], self._end, lambda: None):
            children.preload(settings, "node", workers=Kind.WORKER in kinds, routers=Kind.ROUTER in kinds)
        self._preloaded |= kinds
        self._say("engine", f"vLLM imported in {time.monotonic() - began:.1f} s")

    def _work(self, one: PartOrder) -> Callable[[], None]:
        if one.kind is Kind.WORKER:
            cpu = self._lent[one.name] = self._cores.lend(one.cores) if cpu_build() else ""
            where = Devices(cpu=cpu, environment=dict(one.environment))
            return children.Worker(one.tree, one.name, lambda: self._wanted.get(one.name, one).role, where)
        work = children.router if one.kind is Kind.ROUTER else children.scheduler
        return functools.partial(work, one.tree)

    def _end(self) -> None:
        drains = dict.fromkeys(Kind, 0.0)
        for one in self._running.values():
            drains[one.kind] = max(drains[one.kind], one.end_s - STOP_TIMEOUT_S)
        self._parts.stop(drains[Kind.ROUTER], drains[Kind.WORKER])
