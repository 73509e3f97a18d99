"""Calls to workers, most of them for operators, who can reach only the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from baton.protos import scheduler_pb2 as pb
from baton.protos import worker_pb2, worker_pb2_grpc
from baton.rpc import aio_channel
from baton.scheduler.types import WorkerRecord
from baton.security.names import Role

INSPECT_TIMEOUT_S = 4.0  # shorter than the operator's own timeout
ROLE_TIMEOUT_S = 4.0  # limit for the worker to register; the operator's call waits a little longer
TRY_TIMEOUT_S = 20.0
MAX_TRY_BYTES = 64 << 20


async def inspect(worker: WorkerRecord) -> pb.InspectReply:
    """Ask a worker for its machine and versions, and measure its clock offset."""
    async with _stub(worker) as stub:
        try:
            found = await stub.Inspect(worker_pb2.InspectRequest(), timeout=INSPECT_TIMEOUT_S)
            # This call finds a connection, so its round trip is short.
            began, began_unix = time.monotonic(), time.time()
            clock = worker_pb2.InspectRequest(clock_alone=True)
            there = (await stub.Inspect(clock, timeout=INSPECT_TIMEOUT_S)).unix_s
        except grpc.aio.AioRpcError as error:
            return pb.InspectReply(problem=_silent(worker, error))
    asked_s = time.monotonic() - began
    return pb.InspectReply(
        inspection=found, asked_s=asked_s, clock_ahead_s=there - (began_unix + asked_s / 2)
    )


async def set_role(worker: WorkerRecord, role: pb.Role, fence: int = 0) -> str:
    """Ask a worker and its whole gang to take `role`. Return one line that says why it did not, or "".

    Nothing is recorded here: the workers' next registrations show the new role, so nothing can be wrong after
    either side dies. A restarted worker has the role from its command line. `fence`: the deciding scheduler's
    fencing number; a worker refuses a number below the highest that it has seen. If a member of a gang
    refuses, the others return to their old roles. Until then the members serve in different roles, which
    harms no request.
    """
    if problem := _cannot_take(worker, role):
        return problem
    change = [(one, one.role) for one in worker.members if one.role != role]
    problems = await asyncio.gather(*(_set_role(one, role, fence) for one, _ in change))
    if any(problems):
        back = [one for one, problem in zip(change, problems, strict=True) if not problem]
        problems += await asyncio.gather(*(_set_role(one, was, fence) for one, was in back))
    return next(filter(None, problems), "")


def _cannot_take(worker: WorkerRecord, role: pb.Role) -> str:
    if worker.role == role or pb.ROLE_ENCODE not in (worker.role, role):
        return ""
    why = "it has no language model" if worker.role == pb.ROLE_ENCODE else "it has a language model"
    return f"worker {worker.worker_id} keeps its role: {why}; `baton encode` starts encode workers"


async def _set_role(worker: WorkerRecord, role: pb.Role, fence: int) -> str:
    async with _stub(worker) as stub:
        try:
            order = worker_pb2.SetRoleRequest(role=role, fence=fence)
            reply = await stub.SetRole(order, timeout=ROLE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return _silent(worker, error)
    return f"worker {worker.worker_id} keeps its role: {reply.refusal}" if reply.refusal else ""


async def try_handoff(
    source: WorkerRecord, puller: WorkerRecord, request: pb.TryHandoffRequest
) -> pb.TryHandoffReply:
    asked = await inspect(source)
    if asked.problem:
        return pb.TryHandoffReply(problem=asked.problem)
    if not asked.inspection.kv_addresses:
        return pb.TryHandoffReply(problem=f"worker {source.worker_id} hands no KV over")
    order = worker_pb2.TryHandoffRequest(
        sources=asked.inspection.kv_addresses,
        transport=request.transport,
        bytes=min(request.bytes, MAX_TRY_BYTES),
    )
    async with _stub(puller) as stub:
        try:
            reply = await stub.TryHandoff(order, timeout=TRY_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return pb.TryHandoffReply(problem=_silent(puller, error))
    return pb.TryHandoffReply(bytes=reply.bytes, seconds=reply.seconds, problem=reply.problem)


@asynccontextmanager
async def _stub(worker: WorkerRecord) -> AsyncIterator[Any]:
    channel = aio_channel(worker.identity.address, Role.WORKER)
    try:
        yield worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
    finally:
        await channel.close(None)


def _silent(worker: WorkerRecord, error: grpc.aio.AioRpcError) -> str:
    return (
        f"worker {worker.worker_id} at {worker.identity.address} does not answer: "
        f"{error.details() or error.code().name}"
    )
