"""Change a worker's role by calling the worker, which then registers again.

The scheduler keeps no state about it that could be wrong after either side dies: only the registration
counts. A restarted worker has the role of its command line.
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
    """Ask the worker to take `role`. Return in one line why it did not; empty if it did.

    `fence`: the autoscaler's fencing number. The worker refuses one below the highest it has seen.
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
