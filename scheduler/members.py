"""The processes of a deployment and where each serves its metrics.

Workers tell with their registrations. Schedulers and routers are kept in the store, under a lease: each
scheduler tells of itself and of the routers that ask it for snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from baton import addresses, rpc
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.metrics import role_of
from baton.scheduler.store import Store

LEASE_S = 60.0  # long enough to be missed: a process that dies is still a target, and does not answer
TELL_S = 10.0  # between two words to the store about one process that has not changed
LOOK_S = 2.0  # between two looks at what others told
GONE_S = 0.001  # the lease of one that says goodbye


@dataclass(frozen=True)
class Member:
    """A process that serves metrics."""

    id: str  # another one in each life of a worker or a router
    role: str  # router, scheduler, or a worker's
    host: str  # as in a worker's identity
    address: str  # host:port; empty: it has not said

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its series."""
        return {"instance": self.id, "role": self.role}

    @property
    def reachable(self) -> bool:
        """Whether its address can be dialled from here: one on loopback only from its own machine."""
        try:
            host = addresses.split(self.address)[0]
        except ValueError:  # it said nothing, or what is no address
            return False
        return self.host == rpc.host_id() or not (host.startswith("127.") or host in ("::1", "localhost"))


class Members:
    """The schedulers and routers, as last known. While the store is away, those known before stay."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mine: pb.Process | None = None
        self._untold: dict[str, pb.Process] = {}  # by id: words that the store has not heard
        self._told: dict[str, tuple[float, bytes]] = {}  # id -> when it was told, as what
        self._known: dict[str, pb.Process] = {}
        self._looked_at = -LOOK_S

    @property
    def known(self) -> list[pb.Process]:
        """All of them, this one first."""
        others = [one for key, one in sorted(self._known.items()) if not self._mine or key != self._mine.id]
        return [self._mine, *others] if self._mine else others

    @property
    def schedulers(self) -> int:
        """The number of schedulers, as far as is known."""
        return sum(one.kind == "scheduler" for one in self.known)

    @property
    def hears_all(self) -> bool:
        """Whether no other scheduler hears of more workers, as far as is known."""
        mine = self._mine
        return mine is None or all(
            one.workers <= mine.workers for key, one in self._known.items() if key != mine.id
        )

    def hears(self, workers: int) -> None:
        """Tell others, from the next `tend` on, how many workers this scheduler hears of."""
        if self._mine and self._mine.workers != workers:
            mine = pb.Process()
            mine.CopyFrom(self._mine)
            mine.workers = workers
            self._mine = mine

    def introduce(self, mine: pb.Process) -> None:
        """Tell of this process, from the next `tend` on."""
        self._mine = mine

    def hear(self, process: pb.Process) -> None:
        """Take a process's word for itself. Called about once a second for each router."""
        at, before = self._told.get(process.id, (-TELL_S, b""))
        if process.SerializeToString() != before or time.monotonic() - at >= TELL_S:
            self._untold[process.id] = process

    async def tend(self) -> None:
        """Tell the store what is new, and look at what others told. Called about twice a second."""
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
        """Say goodbye for this process."""
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
    """Return every process that has said where it serves metrics, or should have."""
    found = [Member(one.id, one.kind, one.host, one.metrics_address) for one in processes]
    for worker in workers:
        found.append(Member(worker.worker_id, role_of(worker.role), worker.host, worker.metrics_address))
    return [one for one in found if one.address or one.role not in ("router", "scheduler")]


def targets(known: Iterable[Member]) -> list[dict[str, object]]:
    """Return those that can be scraped from here, in the form of Prometheus' file_sd and http_sd."""
    return [{"targets": [one.address], "labels": one.labels} for one in known if one.reachable]
