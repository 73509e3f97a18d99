"""The places of a fleet: each has its share of the machine, and runs one worker or none, as ordered.

The orders are a list of what shall run, not of what shall change: one that is lost is made good by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.services.config import Settings
from baton.services.fleet import devices
from baton.services.fleet.devices import Devices
from baton.services.fleet.parts import STOP_TIMEOUT_S, Kind, Parts
from baton.services.fleet.watch import Ordered

Run = Callable[[], None]


class Places:
    """A fleet's places. Those of its first workers are named after their roles, further ones by number."""

    def __init__(
        self,
        settings: Settings,
        roles: Sequence[str],
        worker: Callable[[str, Callable[[], str], Devices], Run],
    ) -> None:
        """Make a place for each first worker and, where numbers are chosen, as many more as there may be.

        `worker` returns what a worker's process runs: of that name, that role when it starts, these devices.
        Raises StartError where there are too few devices for the first workers.
        """
        self._worker = worker
        self._end_s = settings.worker.drain_timeout_s + STOP_TIMEOUT_S
        self._fence = 0
        self._roles = {
            f"{role}-{roles[:number].count(role)}": role for number, role in enumerate(roles)
        }  # that are to run
        self.names = list(self._roles)
        limits = settings.autoscale
        each = settings.engine.tensor_parallel_size
        if limits.mode == "on":
            most = devices.room(max(len(roles), limits.max_prefill + limits.max_decode), each)
            self.names += [f"worker-{number}" for number in range(len(roles), most)]
        self._devices = dict(zip(self.names, devices.assign(len(self.names), each), strict=True))

    def start(self, parts: Parts) -> None:
        """Start the first workers."""
        for name in self._roles:
            parts.add(name, Kind.WORKER, self._run(name))

    def obey(self, ordered: Ordered, parts: Parts) -> None:
        """Start what is missing, and let drain what is too many. Late orders are ignored."""
        if ordered.fence < self._fence:
            return
        self._fence = ordered.fence
        known = {part.name: part for part in parts.members if part.kind is Kind.WORKER}
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
