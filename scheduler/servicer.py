"""The gRPC service for routers, workers and operators."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from baton.levels import set_level
from baton.machine import inspection
from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc as rpc
from baton.scheduler import ask
from baton.scheduler.autoscaler import TOLD_S
from baton.scheduler.booking import Assignment, placement_to_wire
from baton.scheduler.errors import StaleWorker
from baton.scheduler.fleet_feed import FleetFeed, status_of
from baton.scheduler.ledger import Ledger
from baton.scheduler.members import SCHEDULER, Members, Processes
from baton.scheduler.metrics import Metrics
from baton.scheduler.need import need_from_wire
from baton.scheduler.placer import Placer
from baton.scheduler.policy import Policy
from baton.scheduler.prefixes.index import PrefixIndex
from baton.scheduler.prefixes.prefix_ledger import PrefixLedger
from baton.scheduler.roster import Peers, Roster, Settling
from baton.scheduler.store import Store
from baton.scheduler.types import (
    FleetView,
    RouterReport,
    SchedulerOptions,
    WorkerRecord,
    attempt_to_wire,
    booked_to_wire,
    place_of,
)

SNAPSHOT_AGE_S = 0.5  # maximum age of the feed; routers use it only when no scheduler answers
PLACED_AT_ONCE = 16  # placements between pauses; with 500 full pairs of workers each takes 2 ms
SHOWN_ATTEMPTS = 256  # live attempts in a description
RETRY_AFTER_S = {  # delay after which a retry may help; 0: never
    pb.Rejection.CODE_NO_WORKERS: 2.0,
    pb.Rejection.CODE_FULL: 1.0,
    pb.Rejection.CODE_TOO_LARGE: 0.0,
    pb.Rejection.CODE_STALE_EPOCH: 0.0,
}

Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(rpc.SchedulerServicer):
    """Answer the service's calls. Malformed ones get INVALID_ARGUMENT."""

    def __init__(
        self, options: SchedulerOptions, store: Store, metrics: Metrics, *, autoscales: bool = False
    ) -> None:
        """`autoscales`: whether to store the reports of routers and fleets. Raises BadPolicy."""
        self._options = options
        self._store = store
        self._metrics = metrics
        self.members = Members(store)
        self.settling = Settling(options.worker_lease_s)
        self.prefixes = PrefixLedger(PrefixIndex(), heartbeat_s=options.heartbeat_s)
        self.ledger = Ledger(options.placement_lease_s)
        self.roster = Roster(options.topic, options.worker_lease_s, self.ledger)
        policy = Policy(options, options.policy)
        self.placer = Placer(self.roster, self.ledger, policy, prefixes=self.prefixes)
        self._autoscales = autoscales
        self._processes = Processes()
        self._placed = 0
        self._peers = Peers()
        self._feed = FleetFeed(options.worker_lease_s)
        self._loads: dict[str, bytes] = {}  # router id -> load not yet written to the store
        self._streams: set[asyncio.Task[Any]] = set()  # tasks of the routers' streams

    async def tend(self) -> None:
        """Write routers' loads to the store, for the scheduler that autoscales."""
        loads, self._loads = self._loads, {}
        await asyncio.gather(*(self._store.tell("router", who, load, TOLD_S) for who, load in loads.items()))

    async def Exchange(self, _: object, context: Context) -> None:
        """Answer a router's messages, one at a time, until it disconnects or this scheduler stops."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._streams.add(task)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                await context.write(await self._answer(message))
        except asyncio.CancelledError:
            if task in self._streams:
                raise
        finally:
            self._streams.discard(task)

    def hang_up(self) -> None:
        """Close routers' streams, which otherwise stay open."""
        while self._streams:
            self._streams.pop().cancel()

    async def _answer(self, message: pb.ExchangeRequest) -> pb.ExchangeReply:
        try:
            await asyncio.sleep(0)  # lets a router's cancellation arrive
        except asyncio.CancelledError:
            # The message waited too long: nobody would use its placements.
            self._metrics.rejections.labels("deadline").inc(len(message.needs))
            raise
        reply = pb.ExchangeReply(report=self._report(message.report))  # first, as it frees room
        for number, need in enumerate(message.needs):
            if number % PLACED_AT_ONCE == PLACED_AT_ONCE - 1:
                await asyncio.sleep(0)  # let other calls run
            reply.replies.append(self._place(need))
        reply.report.wanted = self.placer.turns.any
        return reply

    def _place(self, message: pb.Need) -> pb.PlaceReply:
        try:
            need = need_from_wire(message)
        except ValueError as error:
            return pb.PlaceReply(refusal=str(error))
        began = time.perf_counter()
        settling = bool(self.settling)  # before `place`, which may let leases expire
        outcome = self.placer.place(need)
        took_s = time.perf_counter() - began
        self._metrics.place_seconds.observe(took_s)
        if isinstance(outcome, Assignment):
            self._metrics.placed(need, outcome)
            self._placed += 1
            placement = placement_to_wire(outcome, self._options.placement_lease_s)
            return pb.PlaceReply(placement=placement, took_s=took_s)
        self._metrics.rejected(outcome.code)
        if outcome.code == pb.Rejection.CODE_STALE_EPOCH:
            self._metrics.stale("placement")
        rejection = pb.Rejection(
            code=outcome.code,
            message=outcome.message,
            retry_after_s=RETRY_AFTER_S[outcome.code],
            settling=settling,
        )
        return pb.PlaceReply(rejection=rejection, took_s=took_s)

    def _report(self, request: pb.ReportRequest) -> pb.ReportReply:
        try:
            report = RouterReport.from_wire(request)
        except ValueError as error:
            return pb.ReportReply(refusal=str(error))
        result = self.ledger.report(report)
        self._metrics.stale("report", result.stale)
        for booking, event in result.ended:
            if event.kept:
                self.prefixes.note(booking.decode_id, event.kept)
        fenced = set(result.fenced)
        self._metrics.adopted.inc(sum(booking.attempt not in fenced for booking in report.placed))
        return pb.ReportReply(
            lost=[attempt_to_wire(one) for one in result.lost],
            fenced=[attempt_to_wire(one) for one in result.fenced],
            generation=self.ledger.generation,
        )

    async def Snapshot(self, request: pb.SnapshotRequest, _: Context) -> pb.SnapshotReply:
        options = self._options
        self._processes.hear(request.router_id, request.load)
        if self._autoscales and request.HasField("load"):
            self._loads[request.router_id] = request.load.SerializeToString()
        if request.HasField("process"):
            self.members.hear(request.process)
        if self._feed.age_s() >= SNAPSHOT_AGE_S:
            self._feed.refresh(self.roster.view(), self.members.known)
        theirs = self.ledger.booked_by(request.router_id)
        return pb.SnapshotReply(
            fleet=self._feed.since(request.feed, request.revision),
            yours=[booked_to_wire(worker_id, booked) for worker_id, booked in theirs.items()],
            generation=self.ledger.generation,
            settling=bool(self.settling),
            worker_lease_s=options.worker_lease_s,
            placement_lease_s=options.placement_lease_s,
            max_queued_prompt_tokens=options.max_queued_prompt_tokens,
            max_queue_factor=options.max_queue_factor,
            handoff_min_tokens=options.handoff_min_tokens,
            idle_decode_tokens=options.idle_decode_tokens,
            prefix_pull_s=options.prefix_pull_s,
            log_level=self._processes.level(request.router_id),
            left=self.roster.left(),
        )

    async def Register(self, request: pb.RegisterRequest, _: Context) -> pb.RegisterReply:
        problem = _problem_of(request)
        if problem:
            return pb.RegisterReply(refusal=problem)
        try:
            refusal = self.roster.register(request.identity, request.state)
        except StaleWorker as error:
            self._metrics.stale("worker")
            return pb.RegisterReply(refusal=str(error), epoch=error.last)
        options = self._options
        return pb.RegisterReply(
            refusal=refusal, heartbeat_s=options.heartbeat_s, lease_s=options.worker_lease_s
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        if request.state == pb.WORKER_STATE_UNSPECIFIED:
            await _refuse(context, f"worker {request.worker_id!r} sent no state")
        heard = self.roster.heartbeat(request.worker_id, request.state, request.load, request.epoch)
        self._metrics.stale("worker", heard.stale)
        known = None
        if heard.known and request.HasField("blocks"):
            known = self.prefixes.hear(request.worker_id, request.blocks)
        peers = 0.0
        if request.load.HasField("drafting"):
            peers = self._peers.reference(request.worker_id, self.roster.view())
        return pb.HeartbeatReply(
            known=heard.known,
            drain=heard.drain,
            peer_reference=peers,
            log_level=self._processes.level(request.worker_id),
            clock_s=time.time(),
            blocks=known,
        )

    async def Deregister(self, request: pb.DeregisterRequest, _: Context) -> pb.DeregisterReply:
        if not self.roster.deregister(request.worker_id, request.epoch):
            self._metrics.stale("worker")
        return pb.DeregisterReply()

    async def FindLeader(self, request: pb.FindLeaderRequest, _: Context) -> pb.FindLeaderReply:
        return pb.FindLeaderReply(address=self.roster.leader_of(request.gang))

    async def Describe(self, _: pb.DescribeRequest, __: Context) -> pb.Description:
        workers = self.roster.view().workers.values()
        attempts, handoffs = self.ledger.history(SHOWN_ATTEMPTS)
        now = time.monotonic()
        ordered = sorted(workers, key=lambda worker: (worker.role, worker.worker_id))
        return pb.Description(
            topic=self._options.topic,
            store=self._store.name,
            workers=[status_of(worker, now - worker.heard_at) for worker in ordered],
            attempts=attempts,
            handoffs=handoffs,
            store_problem=self._store.problem,
            drained=sorted(self._store.drained),
            routers=self._processes.routers(),
            processes=self.members.known,
            schedulers=[pb.SchedulerStatus(placements=self._placed, store_problem=self._store.problem)],
        )

    async def Drain(self, request: pb.DrainRequest, _: Context) -> pb.DrainReply:
        meant = _meant(request.worker_id, self.roster.view())
        if isinstance(meant, str):
            return pb.DrainReply(problem=meant)
        await self._drain(place_of(meant.identity))
        return pb.DrainReply(worker_id=meant.identity.gang.name or meant.worker_id)

    async def Undrain(self, request: pb.UndrainRequest, _: Context) -> pb.UndrainReply:
        drained = self._store.drained
        asked = request.worker_id
        # An id that begins with a name and a dot belongs to a worker of that name or gang.
        meant = sorted(name for name in drained if name.startswith(asked) or asked.startswith(f"{name}."))
        if asked in drained:
            meant = [asked]
        if len(meant) != 1:
            there = f"drained are: {', '.join(sorted(drained))}" if drained else "no worker is drained"
            which = "means several workers" if meant else "is no drained worker's name"
            return pb.UndrainReply(problem=f"{asked!r} {which}; {there}")
        await self._drain(meant[0], undo=True)
        return pb.UndrainReply(name=meant[0])

    async def SetRole(self, request: pb.SetRoleRequest, _: Context) -> pb.SetRoleReply:
        meant = _meant(request.worker_id, self.roster.view())
        problem = meant if isinstance(meant, str) else await ask.set_role(meant, request.role)
        if isinstance(meant, str) or problem:
            return pb.SetRoleReply(problem=problem)
        self._metrics.role_changes.labels("asked").inc()
        return pb.SetRoleReply(worker_id=meant.identity.gang.name or meant.worker_id)

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, _: Context) -> pb.SetLogLevelReply:
        workers = self.roster.view().workers
        reply = self._processes.ask_level(request.process, request.level, workers)
        if SCHEDULER in reply.processes:
            set_level(request.level)
        return reply

    async def Inspect(self, request: pb.InspectRequest, _: Context) -> pb.InspectReply:
        if request.clock_alone:
            return pb.InspectReply(inspection=pb.Inspection(unix_s=time.time()))
        if not request.worker_id:
            return pb.InspectReply(inspection=await asyncio.to_thread(inspection))
        meant = _meant(request.worker_id, self.roster.view())
        return pb.InspectReply(problem=meant) if isinstance(meant, str) else await ask.inspect(meant)

    async def TryHandoff(self, request: pb.TryHandoffRequest, _: Context) -> pb.TryHandoffReply:
        view = self.roster.view()
        source, puller = _meant(request.from_worker_id, view), _meant(request.to_worker_id, view)
        if isinstance(source, str):
            return pb.TryHandoffReply(problem=source)
        if isinstance(puller, str):
            return pb.TryHandoffReply(problem=puller)
        return await ask.try_handoff(source, puller, request)

    async def Orders(self, request: pb.OrdersRequest, context: Context) -> pb.OrdersReply:
        if not request.fleet_id:
            await _refuse(context, "a fleet needs an id")
        if not self._autoscales:
            return pb.OrdersReply()
        orders = await self._store.tell("fleet", request.fleet_id, request.SerializeToString(), TOLD_S)
        return pb.OrdersReply.FromString(orders)

    async def _drain(self, name: str, *, undo: bool = False) -> None:
        await self._store.drain(name, undo=undo)
        self.roster.drain(self._store.drained)


async def _refuse(context: Context, why: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
    raise AssertionError("abort raises")


def _problem_of(request: pb.RegisterRequest) -> str:
    identity = request.identity
    if not identity.worker_id or not identity.address:
        return "a worker needs an id and an address"
    if identity.role == pb.ROLE_UNSPECIFIED:
        return f"worker {identity.worker_id} has no role: prefill, decode, mixed or encode"
    if request.state == pb.WORKER_STATE_UNSPECIFIED:
        return f"worker {identity.worker_id} has no state: starting or ready"
    capacity = identity.capacity
    has_kv = identity.role == pb.ROLE_ENCODE or (capacity.block_size and capacity.num_blocks)
    if request.state != pb.WORKER_STATE_STARTING and not (
        has_kv and capacity.max_num_seqs and capacity.max_model_len
    ):
        return f"worker {identity.worker_id} is ready but did not send its capacity"
    return ""


def _meant(asked: str, view: FleetView) -> WorkerRecord | str:
    """Return the worker with this id, name or unique prefix, or the problem in one line.

    A gang's name stands for all of its workers.
    """
    known = sorted(view.workers)
    if asked in view.workers:
        return view.workers[asked]
    named = [one for one in view.workers.values() if asked in (one.identity.name, one.identity.gang.name)]
    if asked and named:
        return named[-1]  # its predecessor's lease may not have expired yet
    matches = [key for key in known if key.startswith(asked)]
    if len(matches) == 1:
        return view.workers[matches[0]]
    if matches:
        return f"{asked!r} means several workers: {', '.join(matches)}; give more of the id"
    there = f"there are: {', '.join(known)}" if known else "there is none"
    return f"no worker's id begins with {asked!r}; {there}"
