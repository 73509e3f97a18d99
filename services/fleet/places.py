"""The places of a model's fleet: each has a share of the machine and at most one worker, as ordered.

A gang takes one place, with a share for each of its workers (`PLACE.r0`, `PLACE.r1`, ...). Each order lists
every worker that should run, so the next order makes up for a lost one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from baton.services.config import EngineSettings, Settings, laid_over
from baton.services.fleet import devices
from baton.services.fleet.devices import Devices
from baton.services.fleet.parts import STOP_TIMEOUT_S, Kind, Parts
from baton.services.fleet.watch import Ordered
from baton.services.roles import ENCODE, encoder_settings

Run = Callable[[], None]
# Makes the function of a worker's process, from its name, the role with which it starts, and its devices.
Worker = Callable[[str, Callable[[], str], Devices], Run]


@dataclass(frozen=True)
class Plan:
    """A model's fleet: its first workers and its settings."""

    settings: Settings
    roles: Sequence[str]  # the first workers' roles
    prefix: str = ""  # prefix of the workers' names

    def settings_of(self, role: str) -> Settings:
        """Return the settings of a role's workers. Raises ConfigError."""
        if role == ENCODE.name:
            return encoder_settings(self.settings)
        values = self.settings.fleet.engines.get(role)  # type: ignore[call-overload]
        if not values:
            return self.settings
        own = self.settings.model_copy(deep=True)
        own.engine = laid_over(own.engine, values, "engine", f"fleet.engines.{role}")
        return own

    @property
    def sides_differ(self) -> bool:
        """Whether a role has an engine of its own. If so, each place belongs to one role."""
        return any(self.settings.fleet.engines.values())

    def further(self) -> list[str]:
        """Return a role for each place beyond the first workers', if there are devices for it.

        "": prefill or decode
        """
        limits = self.settings.autoscale
        if limits.mode != "on":
            return []
        most = {role: limits.bounds(role)[1] for role in ("prefill", "decode")}
        encode = [ENCODE.name] * (limits.bounds(ENCODE.name)[1] - self.roles.count(ENCODE.name))
        if not self.sides_differ:
            return encode + [""] * (sum(most.values()) - sum(role in most for role in self.roles))
        more = ([role] * (number - self.roles.count(role)) for role, number in most.items())
        return encode + [role for pair in zip_longest(*more) for role in pair if role]


def places_of(
    fleets: Sequence[Plan], worker: Callable[[Settings], Worker], gpus: Sequence[str] | None = None
) -> list[Places]:
    """Divide the machine among fleets; all first workers get their devices before further places do.

    `worker` makes the function that starts a fleet's workers. `gpus`: fleet.devices. Raises StartError if
    there are too few devices for the first workers, and ConfigError for GPUs that cannot be shared this way.
    """
    roles = [list(one.roles) for one in fleets]
    needed = sum(_gpus(one.settings_of(role)) for one in fleets for role in one.roles)
    for one, own in zip(fleets, roles, strict=True):
        for role in one.further():
            if devices.room(1, each := _gpus(one.settings_of(role)), needed, gpus) < 1:
                continue
            needed += each
            own.append(role)
    settings = [[one.settings_of(role) for role in own] for one, own in zip(fleets, roles, strict=True)]
    engines = [each.engine for each in chain(*settings) for _ in range(each.engine.local_members)]
    shares = devices.assign([one.local_ranks for one in engines], gpus)
    devices.check_memory(shares, engines)
    left = iter(shares)
    return [
        Places(one, worker, list(zip(its, own, strict=True)), left)
        for one, its, own in zip(fleets, roles, settings, strict=True)
    ]


def _gpus(place: Settings) -> int:
    return place.engine.local_ranks * place.engine.local_members


class Places:
    """A fleet's places, named after their roles. Further ones that suit any role are numbered."""

    def __init__(
        self,
        fleet: Plan,
        worker: Callable[[Settings], Worker],
        places: Sequence[tuple[str, Settings]],
        shares: Iterator[Devices],
    ) -> None:
        """Make `places`, beginning with those of the first workers, with a share for each worker."""
        self._end_s = fleet.settings.worker.drain_timeout_s + STOP_TIMEOUT_S
        self._fence = 0
        roles, prefix = [role for role, _ in places], fleet.prefix
        self.names = [
            f"{prefix}{role}-{roles[:number].count(role)}" if role else f"{prefix}worker-{number}"
            for number, role in enumerate(roles)
        ]
        # name -> role of each place in which workers should run
        self._roles = dict(zip(self.names, fleet.roles, strict=False))
        scaled = fleet.settings.autoscale.bounds(ENCODE.name)[1] > 0
        # name -> role of each place without orders
        self._fixed = {name: role for name, role in self._roles.items() if role == ENCODE.name and not scaled}
        # name -> the role to which each place with orders belongs; "": prefill or decode
        self.owners = {
            name: role if fleet.sides_differ or role == ENCODE.name else ""
            for name, role in zip(self.names, roles, strict=True)
            if name not in self._fixed
        }
        self._runs = {
            name: self._members(name, own, worker, shares)
            for name, (_, own) in zip(self.names, places, strict=True)
        }

    def start(self, parts: Parts) -> None:
        for name in self._roles:
            self._start(name, parts, ordered=False)

    def obey(self, ordered: Ordered, parts: Parts) -> None:
        """Start missing workers and drain surplus ones. Outdated orders are ignored."""
        if ordered.fence < self._fence:
            return
        self._fence = ordered.fence
        places = {member: name for name, members in self._runs.items() for member in members}
        known = [part for part in parts.members if part.name in places]
        self._roles = self._fixed | {
            name: role for name, role in ordered.roles.items() if name in self.owners
        }
        occupied = {places[part.name] for part in known}
        for name, role in self._roles.items():
            if name not in occupied:
                parts.say(name, f"ordered: {role} worker")
                self._start(name, parts, ordered=True)
        for part in known:
            if places[part.name] not in self._roles and part.leaves_by is None:
                parts.say(part.name, "no longer ordered: draining")
                parts.retire(part, self._end_s)

    def _start(self, name: str, parts: Parts, *, ordered: bool) -> None:
        for member, run in self._runs[name].items():
            gang = name if member != name else ""
            parts.add(member, Kind.WORKER, run, ordered=ordered, gang=gang)

    def _members(
        self,
        name: str,
        settings: Settings,
        worker: Callable[[Settings], Worker],
        shares: Iterator[Devices],
    ) -> dict[str, Run]:
        """Return the functions of a place's workers, by the workers' names."""

        def role() -> str:
            return self._roles[name]

        own = members_of(name, settings)
        return {member: worker(one)(member, role, next(shares)) for member, one in own.items()}


def members_of(place: str, settings: Settings) -> dict[str, Settings]:
    """Return the settings of a place's processes on this machine, by name: a worker, or a gang's members."""
    engine = settings.engine
    node = settings.fleet.node_rank if engine.nodes > 1 else 0
    found = {name: settings.model_copy(deep=True) for name in names_of(place, engine, node)}
    for rank, own in enumerate(found.values(), node * engine.local_members):
        own.worker.gang = "" if engine.members == 1 else f"{place}/{rank}"
    return found


def names_of(place: str, engine: EngineSettings, node: int) -> list[str]:
    """Return the names of a place's processes on its gang's machine number `node`, from 0."""
    if engine.members == 1:
        return [place]
    first = node * engine.local_members
    return [f"{place}.r{rank}" for rank in range(first, first + engine.local_members)]
