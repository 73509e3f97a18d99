"""A change of a worker's role: a call to the worker itself, which then registers with the new one.

The registration counts, as at a worker's start: nothing is remembered here that could be left over when one
of the two dies in between. A worker that is started again has the role of its command line.
"""

from __future__ import annotations

import grpc.aio

from baton.protos import scheduler_pb2 as pb
from baton.protos import worker_pb2, worker_pb2_grpc
from baton.rpc import aio_channel
from baton.scheduler.types import WorkerRecord
from baton.security.names import Role

TIMEOUT_S = 4.0  # s; the worker registers within it, and the operator's call waits a little longer


async def set_role(worker: WorkerRecord, role: pb.Role, fence: int = 0) -> str:
    """Give the worker that role. Return why it keeps its own, in one line; empty when it took it.

    `fence` is the autoscaler's; the worker refuses one below another that it has seen.
    """
    if worker.role == role:
        return ""
    channel = aio_channel(worker.identity.address, Role.WORKER)
    try:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        reply: worker_pb2.SetRoleReply = await stub.SetRole(
            worker_pb2.SetRoleRequest(role=role, fence=fence), timeout=TIMEOUT_S
        )
    except grpc.aio.AioRpcError as error:
        return f"worker {worker.worker_id} at {worker.identity.address} does not answer: {error.details()}"
    finally:
        await channel.close(None)
    return f"worker {worker.worker_id} keeps its role: {reply.refusal}" if reply.refusal else ""
