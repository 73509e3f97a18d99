"""The wanted workers on Ray, each with its placement group; a gang of workers counts as one and has one."""

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
    bundle: dict[str, float]
    labels: dict[str, str]  # required labels of its node
    members: list[str]  # names of its workers
    node: str = ""  # the id of its node, "" until Ray has placed it
    devices: Any = None  # a reference to its environment variables, if the bundle has GPUs
    environment: dict[str, str] | None = None  # known once Ray has placed it
    leaving: bool = False
    host: str = ""  # the name of its current or last node
    lost_at: float | None = None  # when its node died; None once it is ready elsewhere

    @property
    def key(self) -> str:
        found: str = self.group.id.hex()
        return found

    @property
    def starts(self) -> bool:
        """Whether it should run, and its node and environment are known."""
        return bool(self.node) and self.environment is not None and not self.leaving

    @property
    def waits(self) -> str:
        """The state of a worker that Ray has not placed."""
        lost = f"lost with {self.host}; " if self.lost_at is not None else ""
        return f"{lost}waits for room: {amounts(self.bundle)}"


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

        A worker that is wanted again while it drains is started again once it has left.
        """
        for slot in self._all:
            if slot.name not in wanted and not slot.leaving:
                slot.leaving = True
                self._say(slot.name, "is draining, to leave")
        there = {slot.name for slot in self._all}
        for name, role in wanted.items():
            if name not in there:
                bundle = self._settings.bundle(role)
                labels = self._settings.workers(role).label_selector
                group = cluster.reserve(f"{self._prefix}-{name}", bundle, labels)
                members = names_of(name, self._settings.engine_of(role).data_parallel_size)
                self._all.append(Slot(name, role, role, group, bundle, labels, members))
                self._say(name, f"asks for {amounts(bundle)}")

    def follow(self, roles: Mapping[str, str]) -> list[tuple[Slot, str]]:
        """Adopt the workers' current roles; return the changed workers with their former roles.

        A worker that an operator made mixed still counts for its former role, and is restarted in it.
        """
        changed = []
        for slot in self._all:
            role = roles.get(slot.members[0], slot.role)
            if slot.leaving or role == slot.role or role not in WORKER_ROLES:
                continue
            changed.append((slot, slot.role))
            self._say(slot.name, f"is a {role} worker now")
            slot.role = role
        return changed

    def locate(self, places: Mapping[str, Place], machines: Mapping[str, Machine]) -> None:
        for slot in self._all:
            place = places.get(slot.key, Place("PENDING"))
            node = place.node if place.node in machines else ""
            if node != slot.node:
                if slot.node:
                    slot.lost_at = time.monotonic()
                    self._say(slot.name, f"was {slot.waits}")
                slot.node, slot.devices, slot.environment = node, None, None
                if node:
                    slot.host = machines[node].name
                    self._say(slot.name, f"has room on {slot.host}")
            if slot.node and slot.environment is None:
                _find_devices(slot)

    def back(self, name: str, ready: Collection[str]) -> str:
        """Return a note on how long a worker or its gang was missing, if its node had died, or "".

        ready: the names of all workers that are ready.
        """
        for slot in self._all:
            here = name in slot.members and bool(slot.node) and set(slot.members) <= set(ready)
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
        slot.environment = {}
    elif slot.devices is None:
        slot.devices = cluster.visible(slot.group, slot.bundle)
    else:
        (slot.environment,) = cluster.get([slot.devices], 0.1)


def _new_names(role: str, taken: Collection[str], number: int) -> list[str]:
    """Return `number` unused worker names, the lowest first: prefill-0, prefill-1."""
    candidates = (f"{role}-{at}" for at in range(len(taken) + number))
    return [name for name in candidates if name not in taken][:number]
