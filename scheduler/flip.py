"""Change a worker's role by calling the worker, which then registers with the new one.

As at a worker's start, only the registration counts: no state is kept here that could be left over if either
side dies in between. A restarted worker has the role of its command line.
"""

from __future__ import annotations

import grpc.aio

from baton.protos import scheduler_pb2 as pb
from baton.protos import worker_pb2, worker_pb2_grpc
from baton.rpc import aio_channel
from baton.scheduler.types import WorkerRecord
from baton.security.names import Role

TIMEOUT_S = 4.0  # s for the worker to register; the operator's call waits a little longer


async def set_role(worker: WorkerRecord, role: pb.Role, fence: int = 0) -> str:
    """Ask the worker to take `role`. Return a one-line reason if it does not; empty if it does.

    `fence` is the autoscaler's; the worker refuses one lower than it has seen.
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
