"""The wanted workers on Ray, each with its placement group. A gang counts as one worker."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.services.fleet.parts import Say
from baton.services.fleet.places import names_of
from baton.services.ray import cluster
from baton.services.ray.cluster import Machine, Place
from baton.services.ray.config import WORKER_ROLES, ClusterSettings


@dataclass
class Slot:
    """One wanted worker or gang, and its placement group."""

    name: str
    side: str  # prefill or decode: whose bundle, environment and engine it uses
    role: str  # its current role, which it keeps across restarts
    group: Any  # its placement group
    bundle: dict[str, float]  # on each of its nodes
    labels: dict[str, str]  # required labels of its nodes
    members: list[str]  # names of its processes, by rank
    workers: list[str]  # the members that the scheduler knows; the others run further ranks of an engine
    count: int = 1  # number of its nodes, among which the members are divided evenly
    nodes: tuple[str, ...] = ()  # their ids, () until Ray has placed it
    devices: list[Any] | None = None  # references to each node's variables, if the bundle has GPUs
    environments: list[dict[str, str]] | None = None  # known once Ray has placed it
    leaving: bool = False
    host: str = ""  # the names of its current or last nodes
    lost_at: float | None = None  # when a node died; None once it is ready elsewhere

    @property
    def key(self) -> str:
        found: str = self.group.id.hex()
        return found

    @property
    def starts(self) -> bool:
        """Whether it should run, and its nodes and environments are known."""
        return bool(self.nodes) and self.environments is not None and not self.leaving

    @property
    def waits(self) -> str:
        """The state of a worker that Ray has not placed."""
        lost = f"lost with {self.host}; " if self.lost_at is not None else ""
        return f"{lost}waits for room: {self.wanted}"

    @property
    def wanted(self) -> str:
        each = f" on each of {self.count} nodes" if self.count > 1 else ""
        return amounts(self.bundle) + each

    @property
    def seats(self) -> list[tuple[str, str, str]]:
        """Each member, its worker, and its node or ""."""
        nodes = self.nodes or ("",) * self.count
        return [
            (
                name,
                self.workers[rank * len(self.workers) // len(self.members)],
                nodes[rank * self.count // len(self.members)],
            )
            for rank, name in enumerate(self.members)
        ]


class Slots:
    """All slots. Not thread-safe."""

    def __init__(self, settings: ClusterSettings, prefix: str, say: Say) -> None:
        """Prefix the placement groups' names."""
        self._settings = settings
        self._prefix = prefix
        self._say = say
        self._all: list[Slot] = []

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def by_number(self, wanted: Mapping[str, int]) -> dict[str, str]:
        """Return workers' roles by name for these numbers: the oldest workers, then new ones."""
        chosen: dict[str, str] = {}
        taken = [slot.name for slot in self._all]
        for role, number in wanted.items():
            there = [slot.name for slot in self._all if slot.role == role and not slot.leaving][:number]
            names = [*there, *_new_names(role, taken, number - len(there))]
            chosen |= dict.fromkeys(names, role)
        return chosen

    def match(self, wanted: Mapping[str, str]) -> None:
        """Keep exactly these workers (roles by name), and drain all others.

        A worker that is wanted again while it is draining is started again once it has left.
        """
        for slot in self._all:
            if slot.name not in wanted and not slot.leaving:
                slot.leaving = True
                self._say(slot.name, "is draining, to leave")
        there = {slot.name for slot in self._all}
        for name, role in wanted.items():
            if name not in there:
                slot = self._slot(name, role)
                self._all.append(slot)
                self._say(name, f"asks for {slot.wanted}")

    def _slot(self, name: str, role: str) -> Slot:
        engine, bundle = self._settings.engine_of(role), self._settings.bundle(role)
        labels = self._settings.workers(role).label_selector
        group = cluster.reserve(f"{self._prefix}-{name}", [bundle] * engine.nodes, labels)
        members = [one for node in range(engine.nodes) for one in names_of(name, engine, node)]
        workers = members[:: engine.spread]
        return Slot(name, role, role, group, bundle, labels, members, workers, engine.nodes)

    def follow(self, roles: Mapping[str, str]) -> list[tuple[Slot, str]]:
        """Adopt the workers' current roles; return the changed workers with their former roles.

        A worker that an operator made mixed still counts towards its former role, and is restarted in it.
        """
        changed = []
        for slot in self._all:
            role = roles.get(slot.workers[0], slot.role)
            if slot.leaving or role == slot.role or role not in WORKER_ROLES:
                continue
            changed.append((slot, slot.role))
            self._say(slot.name, f"is a {role} worker now")
            slot.role = role
        return changed

    def locate(self, places: Mapping[str, Place], machines: Mapping[str, Machine]) -> None:
        for slot in self._all:
            place = places.get(slot.key, Place("PENDING"))
            nodes = place.nodes if set(place.nodes) <= machines.keys() else ()
            if nodes != slot.nodes:
                if slot.nodes:
                    slot.lost_at = time.monotonic()
                    self._say(slot.name, f"was {slot.waits}")
                slot.nodes, slot.devices, slot.environments = nodes, None, None
                if nodes:
                    slot.host = ", ".join(machines[node].name for node in nodes)
                    self._say(slot.name, f"has room on {slot.host}")
            if slot.nodes and slot.environments is None:
                _find_devices(slot)

    def back(self, name: str, ready: Collection[str]) -> str:
        """Return a note on how long a worker or its gang was missing, if its node had died, or "".

        ready: the names of all workers that are ready.
        """
        for slot in self._all:
            here = name in slot.workers and bool(slot.nodes) and set(slot.workers) <= set(ready)
            if here and slot.lost_at is not None:
                away_s, slot.lost_at = time.monotonic() - slot.lost_at, None
                return f"; back on {slot.host} {away_s:.1f} s after its node was found dead"
        return ""

    def let_go(self, busy: Collection[str]) -> None:
        """Remove the workers that have left. `busy`: names of workers that may still run."""
        for slot in [one for one in self._all if one.leaving and not set(one.members) & set(busy)]:
            cluster.give_up(slot.group)
            self._all.remove(slot)
            self._say(slot.name, "has left")

    def close(self) -> None:
        for slot in self._all:
            cluster.give_up(slot.group)
        self._all.clear()


def amounts(bundle: Mapping[str, float]) -> str:
    """Return a bundle as text: `1 CPU, 2 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def _find_devices(slot: Slot) -> None:
    if not slot.bundle.get("GPU"):
        slot.environments = [{}] * slot.count
    elif slot.devices is None:
        slot.devices = [cluster.visible(slot.group, slot.bundle, number) for number in range(slot.count)]
    else:
        found = cluster.get(slot.devices, 0.1)
        if None not in found:
            slot.environments = found
        elif cluster.ended(slot.devices):
            slot.devices = None  # one has failed: ask again


def _new_names(role: str, taken: Collection[str], number: int) -> list[str]:
    """Return `number` unused worker names, the lowest first: prefill-0, prefill-1."""
    candidates = (f"{role}-{at}" for at in range(len(taken) + number))
    return [name for name in candidates if name not in taken][:number]
