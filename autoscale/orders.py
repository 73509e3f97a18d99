"""Turn wanted numbers of workers into role changes and contents of fleets' places."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from baton.autoscale.goals import Bounds
from baton.autoscale.seen import Member, Seen
from baton.autoscale.sizing import Counts
from baton.protos import scheduler_pb2 as pb

OTHER = {pb.ROLE_PREFILL: pb.ROLE_DECODE, pb.ROLE_DECODE: pb.ROLE_PREFILL}
SCALED = (*OTHER, pb.ROLE_ENCODE)
Role = pb.Role


@dataclass(slots=True)
class Draft:
    """Draft the orders of one step, starting from the updated plan in force."""

    seen: Seen
    barred: Collection[str] = ()  # places in which no worker came up
    plan: dict[str, dict[str, Role]] = field(default_factory=dict)
    flips: list[tuple[Member, Role]] = field(default_factory=list)
    starts: list[tuple[str, Role]] = field(default_factory=list)  # place, role
    stops: list[Member] = field(default_factory=list)
    _there: dict[str, Member] = field(init=False)  # keyed by name
    _allowed: dict[str, Collection[Role]] = field(init=False)  # roles by place, if not all are allowed

    def __post_init__(self) -> None:
        """Adopt what runs in the places of a new fleet, or of one whose workers changed roles."""
        # A worker that was ordered to leave counts as leaving, although it may still report that it is ready.
        away = {
            place.name
            for fleet, places in self.seen.places.items()
            for place in places
            if fleet in self.seen.plan and place.name not in self.seen.plan[fleet]
        }
        members = [replace(one, leaving=one.leaving or one.name in away) for one in self.seen.members]
        self.seen = replace(self.seen, members=members)
        self._there = {one.name: one for one in members}
        self._allowed = {
            place.name: place.roles for places in self.seen.places.values() for place in places if place.roles
        }
        for fleet, places in self.seen.places.items():
            ordered = self.seen.plan.get(fleet)
            self.plan[fleet] = {
                place.name: role for place in places if (role := self._as_it_is(place.name, ordered))
            }

    def coming(self, role: Role) -> list[str]:
        """Return the places in which a worker of this role was ordered and has not registered."""
        return [
            name
            for ordered in self.plan.values()
            for name, its in ordered.items()
            if its == role and name not in self._there
        ]

    def present(self) -> Counts:
        """Return the numbers of workers present or ordered, without those that are leaving."""
        flipped = {one.worker_id: role for one, role in self.flips}
        stopped = {one.worker_id for one in self.stops}
        count = {role: len(self.coming(role)) for role in SCALED}
        for one in self.seen.members:
            if not one.leaving and one.worker_id not in stopped:
                count[flipped.get(one.worker_id, one.role)] += 1
        return Counts(*(count[role] for role in SCALED))

    def empty(self, roles: Collection[Role]) -> list[tuple[str, pb.Place]]:
        """Return the places for any of these roles in which nothing runs or was ordered.

        Places in the emptiest fleet come first.
        """
        taken = {*self._there, *self.barred}
        free = []
        for fleet, places in self.seen.places.items():
            use = len(self.plan[fleet]) / max(1, len(places))
            free += [
                (use, fleet, place)
                for place in places
                if place.name not in taken
                and place.name not in self.plan[fleet]
                and any(role in (place.roles or OTHER) for role in roles)
            ]
        free.sort(key=lambda one: one[:2])
        return [(fleet, place) for _, fleet, place in free]

    def flip(self, to: Role, most: int, quiet: Mapping[str, float]) -> None:
        """Change the role of up to `most` workers of the other side, the least busy first, but not of all.

        `quiet`: workers that changed their role recently.
        """
        others = [one for one in self.seen.of(OTHER[to]) if not one.leaving]
        able = [
            one
            for one in others
            if one.flips and one.worker_id not in quiet and to in self._allowed.get(one.name, (to,))
        ]
        able.sort(key=lambda one: (busyness(one), _by_name(one)))
        for one in able[: min(most, len(others) - 1)]:
            self.flips.append((one, to))
            for ordered in self.plan.values():
                if one.name in ordered:
                    ordered[one.name] = to

    def start(self, role: Role, most: int) -> None:
        """Order up to `most` workers of this role to start in empty places."""
        for fleet, place in self.empty((role,))[: max(0, most)]:
            self.plan[fleet][place.name] = role
            self.starts.append((place.name, role))

    def stop(self, role: Role, most: int, bounds: Bounds) -> None:
        """Order up to `most` workers of this role to leave: first unregistered ones, then the least busy.

        Among equally busy workers, the last by name leaves first, `worker-3` before `decode-0`: temporary
        workers leave, and their nodes become free. A worker that no fleet started stays, because nobody could
        start it again. So does the last ready worker of a role that generates.
        """
        for name in self.coming(role)[: max(0, most)]:
            self.remove(name)
            most -= 1
        flipped = {one.worker_id for one, _ in self.flips}
        ready = [one for one in self.seen.of(role) if not one.leaving and one.worker_id not in flipped]
        most = min(most, len(ready) - max(role in OTHER, bounds.least))
        for one in sorted(sorted(ready, key=_by_name, reverse=True), key=busyness):
            if most > 0 and self.remove(one.name):
                self.stops.append(one)
                most -= 1

    def remove(self, name: str) -> bool:
        """Order this place to be empty; return whether a worker was ordered there."""
        return any(ordered.pop(name, None) is not None for ordered in self.plan.values())

    def _as_it_is(self, name: str, ordered: Mapping[str, Role] | None) -> Role | None:
        """Return the role of the worker running or ordered in a place, or None."""
        one = self._there.get(name)
        if ordered is None:  # nothing was ordered for this fleet yet
            return one.role if one is not None and not one.leaving else None
        if name not in ordered:
            return None
        return one.role if one is not None else ordered[name]


def busyness(one: Member) -> tuple[int, int]:
    return one.requests, one.queued_tokens


def _by_name(one: Member) -> str:
    return one.worker_id
