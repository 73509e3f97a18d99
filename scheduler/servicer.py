"""The gRPC service for routers, workers and operators, on top of the store.

Nothing of the state is kept here: a restarted scheduler, or a second one beside it, answers the same.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NoReturn

import grpc
import grpc.aio

from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc as rpc
from baton.scheduler.autoscaler import TOLD_S
from baton.scheduler.booking import Assignment
from baton.scheduler.errors import StaleWorker
from baton.scheduler.flip import set_role
from baton.scheduler.metrics import Metrics
from baton.scheduler.placer import Placer
from baton.scheduler.settling import Settling
from baton.scheduler.store import Store
from baton.scheduler.types import (
    FleetView,
    Need,
    Reserved,
    RouterReport,
    SchedulerOptions,
    WorkerRecord,
    attempt_from_wire,
    attempt_to_wire,
    name_of,
    worker_to_wire,
)

SNAPSHOT_AGE_S = 0.5  # routers place from a snapshot only when no scheduler answers any more
PEERS_AGE_S = 5.0  # the references that workers learn of their drafts move slowly
SHOWN_ATTEMPTS = 256  # in a description, and as many finished ones as the store keeps
RETRY_AFTER_S = {  # when asking again may help; 0: never
    pb.Rejection.CODE_NO_WORKERS: 2.0,
    pb.Rejection.CODE_FULL: 1.0,
    pb.Rejection.CODE_TOO_LARGE: 0.0,
    pb.Rejection.CODE_STALE_EPOCH: 0.0,
}

Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(rpc.SchedulerServicer):
    """The service's calls. Malformed ones end with INVALID_ARGUMENT."""

    def __init__(
        self,
        options: SchedulerOptions,
        store: Store,
        placer: Placer,
        settling: Settling,
        metrics: Metrics,
        *,
        autoscales: bool = False,
    ) -> None:
        """Serve `store`; what routers and fleets tell is kept only if this deployment `autoscales`."""
        self._options = options
        self._store = store
        self._placer = placer
        self._settling = settling
        self._metrics = metrics
        self._autoscales = autoscales

    async def Place(self, request: pb.PlaceRequest, context: Context) -> pb.PlaceReply:
        try:
            need = _need(request)
        except ValueError as error:
            await _refuse(context, str(error))
        began = time.perf_counter()
        settling = bool(self._settling)  # before: leases may run out in what follows
        outcome = await self._placer.place(need)
        self._metrics.place_seconds.observe(time.perf_counter() - began)
        if isinstance(outcome, Assignment):
            self._metrics.placements.labels("pair" if outcome.prefill else "alone").inc()
            return pb.PlaceReply(placement=self._placement(need, outcome))
        self._metrics.rejected(outcome.code)
        if outcome.code == pb.Rejection.CODE_STALE_EPOCH:
            self._metrics.stale("placement")
        rejection = pb.Rejection(
            code=outcome.code,
            message=outcome.message,
            retry_after_s=RETRY_AFTER_S[outcome.code],
            settling=settling,
        )
        return pb.PlaceReply(rejection=rejection)

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportReply:
        try:
            report = RouterReport.from_wire(request)
        except ValueError as error:
            await _refuse(context, str(error))
        result = await self._store.report(report, self._options.placement_lease_s)
        self._metrics.stale("report", result.stale)
        fenced = set(result.fenced)
        self._metrics.adopted.inc(sum(known.attempt not in fenced for known in report.placed))
        return pb.ReportReply(
            lost=[attempt_to_wire(one) for one in result.lost],
            fenced=[attempt_to_wire(one) for one in result.fenced],
            generation=self._store.generation,
        )

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotReply:
        del context
        options = self._options
        if self._autoscales and request.HasField("load"):
            await self._store.tell("router", request.router_id, request.load.SerializeToString(), TOLD_S)
        settling = bool(self._settling)
        view = await self._placer.view(time.monotonic() - SNAPSHOT_AGE_S)
        theirs = await self._store.booked_by(request.router_id)
        workers = []
        for worker in view.workers.values():
            others = replace(worker.reserved)
            others.take(theirs.get(worker.worker_id, Reserved()))
            workers.append(_status(replace(worker, reserved=others), options.worker_lease_s))
        return pb.SnapshotReply(
            workers=workers,
            generation=self._store.generation,
            settling=settling,
            worker_lease_s=options.worker_lease_s,
            placement_lease_s=options.placement_lease_s,
            max_queued_prompt_tokens=options.max_queued_prompt_tokens,
            max_queue_factor=options.max_queue_factor,
            handoff_min_tokens=options.handoff_min_tokens,
            idle_decode_tokens=options.idle_decode_tokens,
            left=await self._store.left(),
        )

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterReply:
        del context
        problem = _problem_of(request)
        if problem:
            return pb.RegisterReply(refusal=problem)
        lease_s = self._options.worker_lease_s
        try:
            refusal = await self._store.register(request.identity, request.state, lease_s)
        except StaleWorker as error:
            self._metrics.stale("worker")
            return pb.RegisterReply(refusal=str(error), epoch=error.last)
        return pb.RegisterReply(refusal=refusal, heartbeat_s=self._options.heartbeat_s, lease_s=lease_s)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        if request.state == pb.WORKER_STATE_UNSPECIFIED:
            await _refuse(context, f"worker {request.worker_id!r} sent no state")
        heard = await self._store.heartbeat(
            request.worker_id, request.state, request.load, self._options.worker_lease_s, request.epoch
        )
        self._metrics.stale("worker", heard.stale)
        peers = await self._peer_reference(request)
        return pb.HeartbeatReply(known=heard.known, drain=heard.drain, peer_reference=peers)

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterReply:
        del context
        if not await self._store.deregister(request.worker_id, request.epoch):
            self._metrics.stale("worker")
        return pb.DeregisterReply()

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.Description:
        del request, context
        view = await self._placer.view(time.monotonic())
        history = await self._store.history(SHOWN_ATTEMPTS)
        lease_s = self._options.worker_lease_s
        ordered = sorted(view.workers.values(), key=lambda worker: (worker.role, worker.worker_id))
        return pb.Description(
            topic=self._options.topic,
            store=self._store.name,
            workers=[_status(worker, lease_s) for worker in ordered],
            attempts=history.attempts,
            handoffs=history.handoffs,
            store_problem=self._store.problem,
            drained=sorted(view.drained),
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        del context
        meant = _meant(request.worker_id, await self._placer.view(time.monotonic()))
        if isinstance(meant, str):
            return pb.DrainReply(problem=meant)
        await self._store.drain(name_of(meant.identity))
        return pb.DrainReply(worker_id=meant.worker_id)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainReply:
        del context
        drained = (await self._placer.view(time.monotonic())).drained
        asked = request.worker_id
        # An id that begins with a name and a dot belongs to a worker of that name.
        meant = sorted(name for name in drained if name.startswith(asked) or asked.startswith(f"{name}."))
        if asked in drained:
            meant = [asked]
        if len(meant) != 1:
            there = f"drained are: {', '.join(sorted(drained))}" if drained else "no worker is drained"
            which = "means several workers" if meant else "is no drained worker's name"
            return pb.UndrainReply(problem=f"{asked!r} {which}; {there}")
        await self._store.drain(meant[0], undo=True)
        return pb.UndrainReply(name=meant[0])

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleReply:
        del context
        meant = _meant(request.worker_id, await self._placer.view(time.monotonic()))
        problem = meant if isinstance(meant, str) else await set_role(meant, request.role)
        if isinstance(meant, str) or problem:
            return pb.SetRoleReply(problem=problem)
        self._metrics.flips.labels("asked").inc()
        return pb.SetRoleReply(worker_id=meant.worker_id)

    async def Orders(self, request: pb.OrdersRequest, context: Context) -> pb.OrdersReply:
        if not request.fleet_id:
            await _refuse(context, "a fleet needs an id")
        if not self._autoscales:
            return pb.OrdersReply()
        orders = await self._store.tell("fleet", request.fleet_id, request.SerializeToString(), TOLD_S)
        return pb.OrdersReply.FromString(orders)

    async def _peer_reference(self, request: pb.HeartbeatRequest) -> float:
        """Return the best reference of the workers with the same method, perhaps seconds old; 0: none."""
        if not request.load.HasField("drafting"):
            return 0.0
        workers = (await self._placer.view(time.monotonic() - PEERS_AGE_S)).workers
        me = workers.get(request.worker_id)
        if me is None:
            return 0.0
        return max(
            (
                other.load.drafting.learned_reference
                for other in workers.values()
                if other is not me
                and other.load is not None
                and other.capacity.speculative_method == me.capacity.speculative_method
            ),
            default=0.0,
        )

    def _placement(self, need: Need, assigned: Assignment) -> pb.Placement:
        return pb.Placement(
            request_id=need.attempt.request_id,
            epoch=need.attempt.epoch,
            prefill=worker_to_wire(assigned.prefill) if assigned.prefill else None,
            decode=worker_to_wire(assigned.decode),
            lease_s=self._options.placement_lease_s,
            blocks=assigned.booking.blocks,
            waits=assigned.waits,
        )


async def _refuse(context: Context, why: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
    raise AssertionError("abort raises")


def _need(request: pb.PlaceRequest) -> Need:
    """Return the need of a request. Raises ValueError for one that makes no sense."""
    return Need(
        attempt=attempt_from_wire(pb.Attempt(request_id=request.request_id, epoch=request.epoch)),
        router_id=request.router_id,
        prompt_tokens=request.prompt_tokens,
        max_new_tokens=request.max_new_tokens,
        prefix_hashes=tuple(request.prefix_hashes),
        exclude=frozenset(request.exclude_workers),
        vllm_version=request.vllm_version,
        model_fingerprint=request.model_fingerprint,
        waited_s=request.waited_s,
    )


def _problem_of(request: pb.RegisterRequest) -> str:
    """Say why a registration makes no sense, in one line; empty when it does."""
    identity = request.identity
    if not identity.worker_id or not identity.address:
        return "a worker needs an id and an address"
    if identity.role == pb.ROLE_UNSPECIFIED:
        return f"worker {identity.worker_id} has no role: prefill, decode or mixed"
    if request.state == pb.WORKER_STATE_UNSPECIFIED:
        return f"worker {identity.worker_id} has no state: starting or ready"
    capacity = identity.capacity
    if request.state != pb.WORKER_STATE_STARTING and not (
        capacity.block_size and capacity.num_blocks and capacity.max_num_seqs and capacity.max_model_len
    ):
        return f"worker {identity.worker_id} is ready but did not send its capacity"
    return ""


def _meant(asked: str, view: FleetView) -> WorkerRecord | str:
    """Return the one worker whose id is `asked`, or alone begins so; else why there is none, in one line."""
    known = sorted(view.workers)
    matches = [asked] if asked in view.workers else [key for key in known if key.startswith(asked)]
    if len(matches) == 1:
        return view.workers[matches[0]]
    if len(matches) > 1:
        return f"{asked!r} means several workers: {', '.join(matches)}; give more of the id"
    there = f"there are: {', '.join(known)}" if known else "there is none"
    return f"no worker's id begins with {asked!r}; {there}"


def _status(record: WorkerRecord, lease_s: float) -> pb.WorkerStatus:
    state = pb.WORKER_STATE_DRAINING if record.drain_asked else record.state
    return pb.WorkerStatus(
        identity=record.identity,
        state=state,
        load=record.load,
        heartbeat_age_s=max(0.0, lease_s - record.lease_left_s),
        reserved_prompt_tokens=record.reserved.prompt_tokens,
        reserved_requests=record.reserved.requests,
        reserved_blocks=record.reserved.blocks,
        reserved_decoding=record.reserved.decoding,
        drained=record.held,
    )
