"""The places of a model's fleet: each has its share of the machine, and runs one worker or none, as ordered.

The orders are a list of what shall run, not of what shall change: one that is lost is made good by the next.
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
# Returns what a worker's process runs: of that name, that role when it starts, on these devices.
Worker = Callable[[str, Callable[[], str], Devices], Run]


@dataclass(frozen=True)
class Plan:
    """A model's fleet, as its places need it."""

    settings: Settings
    roles: Sequence[str]  # of its first workers
    prefix: str = ""  # of their names

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.settings.engine.tensor_parallel_size

    @property
    def most(self) -> int:
        """The most workers that it may have, devices permitting."""
        limits = self.settings.autoscale
        chosen = limits.max_prefill + limits.max_decode if limits.mode == "on" else 0
        return max(len(self.roles), chosen)


def places_of(
    fleets: Sequence[Plan], worker: Callable[[Settings], Worker], gpus: Sequence[str] | None = None
) -> list[Places]:
    """Share the machine out to fleets; further places of the first ones go before those of the others.

    `worker` makes what starts the workers of one fleet. `gpus`: fleet.devices. Raises StartError where there
    are too few devices for the first workers, and ConfigError for GPUs that cannot be shared so.
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
    """A fleet's places. Those of its first workers are named after their roles, further ones by number."""

    def __init__(self, fleet: Plan, worker: Worker, shares: Iterator[Devices], most: int) -> None:
        """Make a place for each first worker, and further ones where there may be `most` of them.

        Each takes one of the `shares`.
        """
        self._worker = worker
        self._end_s = fleet.settings.worker.drain_timeout_s + STOP_TIMEOUT_S
        self._fence = 0
        roles, prefix = fleet.roles, fleet.prefix
        self._roles = {
            f"{prefix}{role}-{roles[:number].count(role)}": role for number, role in enumerate(roles)
        }  # that are to run
        self.names = [*self._roles, *(f"{prefix}worker-{number}" for number in range(len(roles), most))]
        self._devices = {name: next(shares) for name in self.names}

    def start(self, parts: Parts) -> None:
        """Start the first workers."""
        for name in self._roles:
            parts.add(name, Kind.WORKER, self._run(name))

    def obey(self, ordered: Ordered, parts: Parts) -> None:
        """Start what is missing, and let drain what is too many. Late orders are ignored."""
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
                parts.say(name, "ordered away: drains")
                parts.retire(part, self._end_s)

    def _run(self, name: str) -> Run:
        # The role is looked up at each start: it may have changed when a worker is started again.
        return self._worker(name, lambda: self._roles[name], self._devices[name])
