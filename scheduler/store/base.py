"""The interface of a store of a topic's state: its workers, their bookings, the epochs that count.

Called by the scheduler's own process alone; several schedulers may share one store. Every method is one
atomic step: no other call sees half of it. Time is the store's own, never the caller's.

    by placements   view, reserve
    by routers      report
    by workers      register, heartbeat, deregister
    by operators    history, drain
    by autoscaling  tell, lead, told, order
    by other stores export, merge
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.types import (
    Claim,
    FleetView,
    Heard,
    History,
    ReportResult,
    Reserved,
    ReserveResult,
    RouterReport,
    State,
    Told,
    held,
)

TOLD_KINDS = ("router", "fleet", "process", "turns")


class Store(ABC):
    """A topic's state.

    Every method raises StoreUnavailable, within a second, when the store is away; those of a store that
    `open_store` returns raise it in `open` alone.

    Entries out of time (attempts not renewed, workers without heartbeats, epochs long past) are swept by
    `view`, `reserve` and `register`, so that no decision is made on dead ones.
    """

    name: str  # memory, or the URL without its password
    generation: str = ""  # set by `merge`: the same for as long as the store has lost nothing
    problem: str = ""  # why it works without the database that it is named after; empty while it has that

    @abstractmethod
    async def view(self) -> FleetView:
        """Return the workers alive and their bookings. Sweeps first. Called up to some 50 times a second."""

    @abstractmethod
    async def reserve(self, claim: Claim, lease_s: float) -> ReserveResult:
        """Book `claim` if its epoch is new, its workers take requests and its limits hold; or do nothing.

        So any number of schedulers may decide at once, also one that stood still: what is full or late is
        found here.

        Sweeps first. A live attempt at the same request with an older epoch is released on the way, whatever
        the outcome, unless this one is STALE. Called once per placement, rarely twice.
        """

    @abstractmethod
    async def report(self, report: RouterReport, lease_s: float) -> ReportResult:
        """Apply a router's report. Events with an older epoch, or of an attempt that is gone, change nothing.

        Placed books what runs already, whatever the limits say. Prefilled releases the prompt's tokens (and
        the prefill worker), finished releases all and is remembered in the history, renewed holds the attempt
        for another `lease_s`. A finished attempt is remembered also where it was not known: another store may
        hold it. Called some 100 times a second a router.
        """

    @abstractmethod
    async def register(self, identity: pb.WorkerIdentity, state: pb.WorkerState, lease_s: float) -> str:
        """Add or replace a worker; return an empty text when accepted, else why not, in one line.

        The first worker alive decides which model the topic serves; others must serve it, too. Sweeps first.
        Raises StaleWorker when `identity.epoch` is below the worker's last one.
        Called once or twice in a worker's life, and again when the state was lost.
        """

    @abstractmethod
    async def heartbeat(
        self, worker_id: str, state: pb.WorkerState, load: pb.WorkerLoad, lease_s: float, epoch: int = 0
    ) -> Heard:
        """Hold a worker for another `lease_s` and remember its load.

        A heartbeat of an unknown worker changes nothing; neither does one whose `epoch` is below the worker's
        last one. Called about once a second a worker.
        """

    @abstractmethod
    async def deregister(self, worker_id: str, epoch: int = 0) -> bool:
        """Forget a worker, if it is known. Its bookings stay until the requests are over.

        Return False, and change nothing, when `epoch` is below the worker's last one.
        """

    @abstractmethod
    async def drain(self, name: str, *, undo: bool = False) -> bool:
        """Place nothing more on workers of this name, present and future, or `undo` that.

        They hear of it with their heartbeats. Return False if it was so already.
        """

    @abstractmethod
    async def take_turn(self, what: str, for_s: float) -> bool:
        """Return True to one caller of all schedulers, False to all others for `for_s`. Called rarely."""

    @abstractmethod
    async def tell(self, kind: str, who: str, message: bytes, lease_s: float) -> bytes:
        """Keep the last message of one of `TOLD_KINDS` for `lease_s`; return a fleet's orders.

        Called about once a second for each of them.
        """

    @abstractmethod
    async def lead(self, who: str, for_s: float) -> int:
        """Make `who` the one decider for `for_s`, or longer if it is already; return its fence.

        Return 0 while another one is. Each new decider has a higher fence than all before, also where the
        store has lost what it held: it is of the store's clock. Called every few seconds.
        """

    @abstractmethod
    async def told(self) -> Told:
        """Return what was told within its lease, and the orders. Called every two seconds or so."""

    @abstractmethod
    async def order(self, fence: int, orders: Mapping[str, bytes]) -> bool:
        """Replace all orders. Return False, and change nothing, where `fence` is no longer the decider's."""

    @abstractmethod
    async def history(self, limit: int) -> History:
        """Return at most `limit` attempts under way and as many finished ones, newest first."""

    @abstractmethod
    async def export(self, since: int = 0) -> State:
        """Return all that is known; of requests those changed since that `State.revision`, or more.

        Called some two times a second.
        """

    @abstractmethod
    async def merge(self, state: State) -> str:
        """Learn what another store knows; a worker or an epoch known better here stays as it is.

        Return `generation`; a store that holds nothing yet takes that of `state`, if it has one.
        """

    async def open(self) -> None:
        """Connect; to be called once, before all others. Raises StoreUnavailable or StoreRefuses."""
        await self.merge(State())

    async def tend(self) -> None:  # noqa: B027 (most stores need none)
        """Do the upkeep; called about twice a second. Does not raise."""

    async def left(self) -> tuple[str, ...]:
        """Return the workers that deregistered a short while ago. Called once a second a router."""
        return ()

    async def booked_by(self, router_id: str) -> dict[str, Reserved]:
        """Return what the attempts of one router hold, by worker id. Called once a second a router."""
        return held(known for known in (await self.export()).requests if known.router_id == router_id)

    @abstractmethod
    async def close(self) -> None:
        """Give back connections. Does not raise."""
