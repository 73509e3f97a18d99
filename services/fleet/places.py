"""The places of a model's fleet: each has a share of the machine and at most one worker, as ordered.

An order lists all workers that should run, so the next one makes up for a lost one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.services.config import Settings
from baton.services.fleet import devices
from baton.services.fleet.devices import Devices
from baton.services.fleet.parts import STOP_TIMEOUT_S, Kind, Parts
from baton.services.fleet.watch import Ordered

Run = Callable[[], None]
# Makes the function of a worker's process, from its name, its role at start and its devices.
Worker = Callable[[str, Callable[[], str], Devices], Run]


@dataclass(frozen=True)
class Plan:
    """A model's fleet: its first workers and its settings."""

    settings: Settings
    roles: Sequence[str]  # the first workers' roles
    prefix: str = ""  # of the workers' names

    @property
    def gpus(self) -> int:
        return self.settings.engine.ranks

    @property
    def most(self) -> int:
        """The maximum number of the fleet's workers, if there are devices for them."""
        limits = self.settings.autoscale
        chosen = limits.max_prefill + limits.max_decode if limits.mode == "on" else 0
        return max(len(self.roles), chosen)


def places_of(
    fleets: Sequence[Plan], worker: Callable[[Settings], Worker], gpus: Sequence[str] | None = None
) -> list[Places]:
    """Divide the machine among fleets; all first workers get their devices before further places do.

    `worker` makes the function that starts a fleet's workers. `gpus`: fleet.devices. Raises StartError if
    there are too few devices for the first workers, and ConfigError for GPUs that cannot be shared this way.
    """
    needed = sum(one.gpus * len(one.roles) for one in fleets)
    most = []
    for one in fleets:
        needed -= one.gpus * len(one.roles)
        most.append(max(len(one.roles), devices.room(one.most, one.gpus, needed, gpus)))
        needed += one.gpus * most[-1]
    each = [one for one, count in zip(fleets, most, strict=True) for _ in range(count)]
    shares = devices.assign([one.gpus for one in each], gpus)
    devices.check_memory(shares, [one.settings.engine for one in each])
    left = iter(shares)
    return [Places(one, worker(one.settings), left, count) for one, count in zip(fleets, most, strict=True)]


class Places:
    """A fleet's places. The first workers' places are named after their roles, further ones are numbered."""

    def __init__(self, fleet: Plan, worker: Worker, shares: Iterator[Devices], most: int) -> None:
        """Make a place for each first worker, and further ones up to `most`, each with one share."""
        self._worker = worker
        self._end_s = fleet.settings.worker.drain_timeout_s + STOP_TIMEOUT_S
        self._fence = 0
        roles, prefix = fleet.roles, fleet.prefix
        self._roles = {
            f"{prefix}{role}-{roles[:number].count(role)}": role for number, role in enumerate(roles)
        }  # of the workers that should run
        self.names = [*self._roles, *(f"{prefix}worker-{number}" for number in range(len(roles), most))]
        self._devices = {name: next(shares) for name in self.names}

    def start(self, parts: Parts) -> None:
        for name in self._roles:
            parts.add(name, Kind.WORKER, self._run(name))

    def obey(self, ordered: Ordered, parts: Parts) -> None:
        """Start missing workers and drain surplus ones. Outdated orders are ignored."""
        if ordered.fence < self._fence:
            return
        self._fence = ordered.fence
        known = {part.name: part for part in parts.members if part.name in self._devices}
        self._roles = {name: role for name, role in ordered.roles.items() if name in self._devices}
        for name, role in self._roles.items():
            if name not in known:
                parts.say(name, f"ordered: a {role} worker")
                parts.add(name, Kind.WORKER, self._run(name), ordered=True)
        for name, part in known.items():
            if name not in self._roles and part.leaves_by is None:
                parts.say(name, "no longer ordered: draining")
                parts.retire(part, self._end_s)

    def _run(self, name: str) -> Run:
        return self._worker(name, lambda: self._roles[name], self._devices[name])
