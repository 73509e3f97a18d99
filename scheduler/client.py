"""The scheduler's client, for routers, workers and the command line.

Every call has a deadline, and ends with a reply or one of Baton's exceptions. Only the caller knows whether a
retry is safe. A router gets all its placements and snapshots from one of several schedulers, its home.
"""

# Calls by name return Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.rpc import CALL_TIMEOUT_S
from baton.scheduler.booking import placement_to_wire
from baton.scheduler.endpoints import Endpoint, Endpoints
from baton.scheduler.errors import NoCapacity, Refused, SchedulerUnavailable, StaleWorker
from baton.scheduler.need import Need, need_to_wire
from baton.scheduler.policy import NoChoice
from baton.scheduler.router_reports import Reports
from baton.scheduler.standby import Standby
from baton.scheduler.types import Booking, PolicyOptions

SNAPSHOT_TIMEOUT_S = 1.0
HEARTBEAT_TIMEOUT_S = 1.5  # short enough for the next one to arrive within the lease
REGISTER_TIMEOUT_S = 3.0  # set_role waits 4 s for a worker's registrations with all schedulers
INSPECT_TIMEOUT_S = 10.0  # the scheduler asks the worker twice
TRY_TIMEOUT_S = 30.0
ALONE_RETRY_S = 1.0  # suggested retry interval while no scheduler answers


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers chosen for one attempt. The client's reports renew it."""

    attempt: Attempt
    prefill: pb.Worker | None  # None: the decode worker also prefills
    decode: pb.Worker
    source: pb.Worker | None = None  # `prefill` should pull the first `source_tokens` of the prompt from it
    source_tokens: int = 0
    waits: bool = False  # hold back the first token: the decode worker may not start at once
    prompt_tokens: int = 0  # booked on the worker that runs the prompt
    blocks: int = 0  # KV-cache blocks booked on the decode worker
    moved: bool = False  # placed by a scheduler other than the router's home
    from_snapshot: bool = False  # chosen here, without a scheduler
    scheduler: str = ""  # address of the scheduler that chose
    scheduler_s: float = 0.0  # time that the scheduler took


class SchedulerClient:
    """A connection to each scheduler, opened on first use. Create it inside the event loop.

    All calls raise SchedulerUnavailable when no scheduler answers in time, and Refused for a malformed call.
    """

    def __init__(self, address: str, *, router_id: str = "", policy: PolicyOptions | None = None) -> None:
        """Use the schedulers at `address`: host:port, or several separated by commas.

        `place_from_snapshot` needs `policy`. The first snapshot raises BadPolicy if it is invalid.
        """
        self.address = address
        self.router_id = router_id
        self._schedulers = Endpoints(address)
        self.standby = Standby(policy)
        self.reports = Reports(
            {one.address: partial(self._exchange, one) for one in self._schedulers},
            lambda: self.home(router_id),
        )
        self.process: pb.Process | None = None  # this router's own entry, sent with requests for snapshots

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def schedulers(self) -> int:
        return len(self._schedulers)

    @property
    def addresses(self) -> list[str]:
        return self._schedulers.addresses

    @property
    def answering(self) -> bool:
        """Whether at least one scheduler answered its last call."""
        return self._schedulers.answering

    def home(self, key: str) -> str:
        """Return the address of the scheduler that serves this worker or router now."""
        return self._schedulers.pick(key).address

    async def place(self, need: Need) -> Placement:
        """Reserve workers for one attempt until `reports.finished`. Raises NoCapacity.

        Epochs of one request count up from 1.
        """
        scheduler = self._schedulers.pick(self.router_id)
        reply = await self.reports.exchanges[scheduler.address].ask(need_to_wire(need))
        if reply.HasField("refusal"):
            raise Refused(reply.refusal)
        if reply.HasField("rejection"):
            no = reply.rejection
            raise NoCapacity(no.code, no.message, no.retry_after_s, settling=no.settling)
        moved = self.schedulers > 1 and scheduler is not self._schedulers.owner(self.router_id)
        return self._held(need, reply.placement, scheduler.address, moved=moved, scheduler_s=reply.took_s)

    def place_from_snapshot(self, need: Need) -> Placement:
        """Place from the last snapshot, without a scheduler; schedulers are told as soon as they answer.

        Raises NoCapacity, and SchedulerUnavailable without a recent snapshot.
        """
        assigned = self.standby.place(need, self.reports.reserved)
        if assigned is None:
            raise SchedulerUnavailable(f"scheduler at {self.address} does not answer, and no worker is known")
        if isinstance(assigned, NoChoice):
            raise NoCapacity(assigned.code, assigned.message, ALONE_RETRY_S)
        return self._held(need, placement_to_wire(assigned, self.standby.lease_s), from_snapshot=True)

    def _held(self, need: Need, placed: pb.Placement, scheduler: str = "", **how: Any) -> Placement:
        """Keep a placement's booking alive."""
        placement = Placement(
            attempt=need.attempt,
            prefill=placed.prefill if placed.HasField("prefill") else None,
            decode=placed.decode,
            source=placed.source if placed.HasField("source") else None,
            source_tokens=placed.source_tokens,
            waits=placed.waits,
            prompt_tokens=placed.prompt_tokens or need.prompt_tokens,
            blocks=placed.blocks,
            scheduler=scheduler,
            **how,
        )
        booking = Booking(
            attempt=need.attempt,
            router_id=self.router_id,
            prefill_id=placed.prefill.worker_id,
            decode_id=placed.decode.worker_id,
            prompt_tokens=placement.prompt_tokens,
            blocks=placement.blocks,
        )
        self.reports.hold(booking, placed.lease_s, booked_by=scheduler)
        return placement

    async def refresh(self, load: pb.RouterLoad | None = None, reached: Container[str] = ()) -> str:
        """Get a new snapshot for `place_from_snapshot`; report this router's `load`. Call it every second.

        `reached`: ids of the workers that this router can reach. Returns the log level that an operator set
        for this router, or an empty string.
        """
        request = pb.SnapshotRequest(router_id=self.router_id, load=load, process=self.process)
        request.feed, request.revision = self.standby.fleet.feed, self.standby.fleet.revision
        home = self._schedulers.pick(self.router_id)
        snapshot: pb.SnapshotReply = await self._schedulers.ask(home, "Snapshot", request, SNAPSHOT_TIMEOUT_S)
        self.standby.learn(snapshot, reached)
        self.reports.saw_generation(snapshot.generation, home.address)
        return snapshot.log_level

    async def register(
        self, identity: pb.WorkerIdentity, state: pb.WorkerState, *, scheduler: str = ""
    ) -> pb.RegisterReply:
        """Register a worker with the scheduler at an address, by default its `home`.

        Raises Refused when the worker does not fit into the deployment, StaleWorker for an older epoch.
        """
        request = pb.RegisterRequest(identity=identity, state=state)
        asked = self._of_worker(identity.worker_id, scheduler)
        reply: pb.RegisterReply = await self._schedulers.ask(asked, "Register", request, REGISTER_TIMEOUT_S)
        if reply.epoch:
            raise StaleWorker(identity.worker_id, identity.epoch, reply.epoch)
        if reply.refusal:
            raise Refused(reply.refusal)
        return reply

    async def heartbeat(
        self,
        worker_id: str,
        state: pb.WorkerState,
        load: pb.WorkerLoad,
        epoch: int = 0,
        blocks: pb.BlockOperations | None = None,
        *,
        scheduler: str = "",
    ) -> pb.HeartbeatReply:
        request = pb.HeartbeatRequest(worker_id=worker_id, state=state, load=load, epoch=epoch, blocks=blocks)
        asked = self._of_worker(worker_id, scheduler)
        return await self._schedulers.ask(asked, "Heartbeat", request, HEARTBEAT_TIMEOUT_S)

    async def deregister(self, worker_id: str, epoch: int = 0, *, scheduler: str = "") -> None:
        request = pb.DeregisterRequest(worker_id=worker_id, epoch=epoch)
        asked = self._of_worker(worker_id, scheduler)
        await self._schedulers.ask(asked, "Deregister", request, CALL_TIMEOUT_S)

    async def leader_of(self, gang: str) -> str:
        """Return the address of the worker that leads a gang, or "" while no scheduler knows it."""
        replies: dict[str, pb.FindLeaderReply] = await self._schedulers.each(
            "FindLeader", pb.FindLeaderRequest(gang=gang), CALL_TIMEOUT_S
        )
        return next((one.address for one in replies.values() if one.address), "")

    async def describe(self) -> pb.Description:
        """Return everything that the schedulers know, for operators.

        Workers and attempts come from the scheduler that knows the most workers. Routers come from all
        schedulers, because a router is known only to its home.
        """
        replies: dict[str, pb.Description] = await self._schedulers.each(
            "Describe", pb.DescribeRequest(), CALL_TIMEOUT_S
        )
        found = pb.Description()
        found.CopyFrom(
            min(replies.values(), key=lambda reply: (-len(reply.workers), bool(reply.store_problem)))
        )
        routers = {one.router_id: one for reply in replies.values() for one in reply.routers}
        del found.routers[:], found.schedulers[:]
        found.routers.extend(routers[key] for key in sorted(routers))
        for address, reply in replies.items():
            for one in reply.schedulers:
                one.address = address
                found.schedulers.append(one)
        return found

    async def drain(self, worker_id: str) -> pb.DrainReply:
        """Drain a worker; a unique prefix of its id is enough. The reply may name a problem."""
        replies = await self._schedulers.each("Drain", pb.DrainRequest(worker_id=worker_id), CALL_TIMEOUT_S)
        return min(replies.values(), key=lambda one: bool(one.problem))

    async def undrain(self, worker: str) -> pb.UndrainReply:
        """Let the workers of a drained name take requests again; a unique prefix is enough."""
        replies = await self._schedulers.each("Undrain", pb.UndrainRequest(worker_id=worker), CALL_TIMEOUT_S)
        return min(replies.values(), key=lambda one: bool(one.problem))

    async def set_role(self, worker_id: str, role: pb.Role) -> pb.SetRoleReply:
        """Give a worker another role; a unique prefix of its id is enough."""
        request = pb.SetRoleRequest(worker_id=worker_id, role=role)
        return await self._schedulers.call("SetRole", request, CALL_TIMEOUT_S)

    async def set_log_level(self, process: str, level: str) -> pb.SetLogLevelReply:
        """Set the log level of processes. The reply names them, or a problem."""
        request = pb.SetLogLevelRequest(process=process, level=level)
        asked = await self._schedulers.each("SetLogLevel", request, CALL_TIMEOUT_S)
        replies: list[pb.SetLogLevelReply] = list(asked.values())
        named = dict.fromkeys(process for reply in replies for process in reply.processes)
        return pb.SetLogLevelReply(processes=named) if named else replies[0]

    async def inspect(self, worker_id: str = "") -> pb.InspectReply:
        """Ask a worker (without an id, the scheduler) about its machine and versions."""
        request = pb.InspectRequest(worker_id=worker_id)
        return await self._schedulers.call("Inspect", request, INSPECT_TIMEOUT_S)

    async def clock(self) -> float:
        request = pb.InspectRequest(clock_alone=True)
        return (await self._schedulers.call("Inspect", request, CALL_TIMEOUT_S)).inspection.unix_s

    async def try_handoff(
        self, source: str, puller: str, transport: str, size: int, timeout_s: float = TRY_TIMEOUT_S
    ) -> pb.TryHandoffReply:
        """Have worker `puller` pull a test payload of `size` bytes from `source`."""
        request = pb.TryHandoffRequest(
            from_worker_id=source, to_worker_id=puller, transport=transport, bytes=size
        )
        return await self._schedulers.call("TryHandoff", request, timeout_s)

    async def orders(self, fleet_id: str, places: Iterable[pb.Place]) -> pb.OrdersReply:
        """Return what should run in the places of a fleet."""
        request = pb.OrdersRequest(fleet_id=fleet_id, places=places)
        return await self._schedulers.call("Orders", request, CALL_TIMEOUT_S)

    async def close(self) -> None:
        """Send the remaining reports within a second, deregister the router, and disconnect."""
        await self.reports.close()
        if self.process and self.answering:
            self.process = pb.Process(id=self.process.id, kind=self.process.kind)
            with contextlib.suppress(SchedulerUnavailable, Refused):
                await self.refresh()
        await self._schedulers.close()

    async def _exchange(
        self, scheduler: Endpoint, message: pb.ExchangeRequest, timeout_s: float
    ) -> pb.ExchangeReply:
        message.report.router_id = self.router_id
        return await self._schedulers.ask(scheduler, "Exchange", message, timeout_s)

    def _of_worker(self, worker_id: str, scheduler: str) -> Endpoint:
        return self._schedulers.at(scheduler) if scheduler else self._schedulers.pick(worker_id)
