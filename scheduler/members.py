"""The processes of a deployment: the addresses of their metrics, and the log levels that operators set.

Workers report their metrics address when they register. Schedulers and routers have entries in the store,
under a lease: each scheduler writes its own entry and those of the routers that ask it for snapshots.
Everything else is kept in memory: a restarted scheduler hears from its routers within a second, and a process
keeps its level until it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton import addresses, rpc
from baton.enums import role_name
from baton.levels import LEVELS
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.store import Store

LEASE_S = 60.0  # how long a dead process stays a scrape target, so Prometheus reports it as down
TELL_S = 10.0  # between writes of an unchanged entry to the store
LOOK_S = 2.0  # between reads of other schedulers' entries
GONE_S = 0.001  # lease of a process that is leaving


@dataclass(frozen=True)
class Member:
    id: str  # changes with each life of a worker or router
    role: str  # router, scheduler, or a worker's role
    host: str  # same as in a worker's identity
    address: str  # host:port; empty if unknown

    @property
    def labels(self) -> dict[str, str]:
        return {"instance": self.id, "role": self.role}

    @property
    def reachable(self) -> bool:
        """Whether its address can be dialled from here. Loopback addresses need the same machine."""
        try:
            host = addresses.split(self.address)[0]
        except ValueError:  # no address, or a malformed one
            return False
        return self.host == rpc.host_id() or not (host.startswith("127.") or host in ("::1", "localhost"))


class Members:
    """The schedulers and routers last seen in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mine: pb.Process | None = None
        self._untold: dict[str, pb.Process] = {}  # entries not written to the store yet, by id
        self._told: dict[str, tuple[float, bytes]] = {}  # id -> time and content of the last write
        self._known: dict[str, pb.Process] = {}
        self._looked_at = -LOOK_S

    @property
    def known(self) -> list[pb.Process]:
        """All schedulers and routers, this process first."""
        others = [one for key, one in sorted(self._known.items()) if not self._mine or key != self._mine.id]
        return [self._mine, *others] if self._mine else others

    @property
    def schedulers(self) -> int:
        return sum(one.kind == "scheduler" for one in self.known)

    @property
    def hears_all(self) -> bool:
        """Whether no other scheduler has more workers."""
        mine = self._mine
        return mine is None or all(
            one.workers <= mine.workers for key, one in self._known.items() if key != mine.id
        )

    def hears(self, workers: int) -> None:
        """Set the number of this scheduler's workers. `tend` publishes it."""
        if self._mine and self._mine.workers != workers:
            mine = pb.Process()
            mine.CopyFrom(self._mine)
            mine.workers = workers
            self._mine = mine

    def introduce(self, mine: pb.Process) -> None:
        """Set this process's entry. `tend` publishes it."""
        self._mine = mine

    def hear(self, process: pb.Process) -> None:
        """Accept a process's own entry. Called about once a second for each router."""
        at, before = self._told.get(process.id, (-TELL_S, b""))
        if process.SerializeToString() != before or time.monotonic() - at >= TELL_S:
            self._untold[process.id] = process

    async def tend(self) -> None:
        """Write new entries to the store, and read other schedulers' entries. Called about twice a second."""
        if self._store.problem:
            return
        if self._mine:
            self.hear(self._mine)
        await self._tell()
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        told = (await self._store.told()).processes
        self._known = {key: pb.Process.FromString(raw) for key, raw in told.items()}

    async def leave(self) -> None:
        if self._mine:
            self.hear(pb.Process(id=self._mine.id, kind=self._mine.kind))
            await self._tell()

    async def _tell(self) -> None:
        untold, self._untold = self._untold, {}
        now = time.monotonic()
        self._told = {key: one for key, one in self._told.items() if now - one[0] < LEASE_S}
        for process in untold.values():
            message = process.SerializeToString()
            lease_s = LEASE_S if process.metrics_address else GONE_S
            await self._store.tell("process", process.id, message, lease_s)
            self._told[process.id] = now, message


def members(workers: Iterable[pb.WorkerIdentity], processes: Iterable[pb.Process]) -> list[Member]:
    """Return all processes that serve metrics, and workers whose address is unknown."""
    found = [Member(one.id, one.kind, one.host, one.metrics_address) for one in processes]
    for worker in workers:
        found.append(Member(worker.worker_id, role_name(worker.role), worker.host, worker.metrics_address))
    return [one for one in found if one.address or one.role not in ("router", "scheduler")]


def targets(known: Iterable[Member]) -> list[dict[str, object]]:
    """Return the members that can be scraped from here, in the format of Prometheus' file_sd and http_sd."""
    return [{"targets": [one.address], "labels": one.labels} for one in known if one.reachable]


SCHEDULER = "scheduler"
HEARD_S = 10.0  # a router counts as dead after this silence; it should ask once a second
_MOST_ROUTERS = 1024
_MOST_LEVELS = 4096


class Processes:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._routers: dict[str, tuple[float, pb.RouterLoad]] = {}  # id -> time of the last report, its load
        self._levels: dict[str, str] = {}

    def hear(self, router_id: str, load: pb.RouterLoad) -> None:
        now = self._clock()
        self._routers = {name: one for name, one in self._routers.items() if now - one[0] < HEARD_S}
        self._routers[router_id] = now, load
        while len(self._routers) > _MOST_ROUTERS:
            del self._routers[next(iter(self._routers))]

    def routers(self) -> list[pb.RouterStatus]:
        now = self._clock()
        return [
            pb.RouterStatus(router_id=name, heard_age_s=now - at, load=load)
            for name, (at, load) in sorted(self._routers.items())
            if now - at < HEARD_S
        ]

    def level(self, process: str) -> str:
        """Return the log level set for a process, or an empty string."""
        return self._levels.get(process, "")

    def ask_level(self, process: str, level: str, workers: Iterable[str]) -> pb.SetLogLevelReply:
        """Set the level of the processes that match. The reply names them, or the problem."""
        if level not in LEVELS:
            return pb.SetLogLevelReply(problem=f"{level!r} is no log level: use {', '.join(LEVELS)}")
        workers, routers = sorted(workers), [one.router_id for one in self.routers()]
        groups = {"workers": workers, "routers": routers, "all": [SCHEDULER, *routers, *workers]}
        everybody = groups["all"]
        meant = groups.get(process) or [one for one in everybody if process and one.startswith(process)]
        if process in everybody:
            meant = [process]
        if not meant:
            return pb.SetLogLevelReply(
                problem=f"{process!r} is no process here; there are: {', '.join(everybody)}"
            )
        for one in meant:
            self._levels.pop(one, None)
            self._levels[one] = level
        while len(self._levels) > _MOST_LEVELS:
            del self._levels[next(iter(self._levels))]
        return pb.SetLogLevelReply(processes=meant)
