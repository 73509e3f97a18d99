"""What the processes of a deployment hold: memory, requests, blocks."""

from __future__ import annotations

import psutil

from baton.protos import scheduler_pb2
from harness.deployment import Deployment


def processes(one: Deployment) -> dict[str, psutil.Process]:
    """Name -> process: the router, the scheduler and each worker."""
    found = {"scheduler": one.scheduler_process()}
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == one.port and connection.pid:
            found["router"] = psutil.Process(connection.pid)
    for worker in one.describe().workers:
        role = scheduler_pb2.Role.Name(worker.identity.role).removeprefix("ROLE_").lower()
        number = sum(name.startswith(role) for name in found)
        found[f"{role} {number}"] = one.worker_process(worker.identity.worker_id)
    return found


def private_mib(process: psutil.Process) -> float:
    """Memory of this process and its children that nobody shares. The shared KV segments are not growth."""
    everyone = [process, *process.children(recursive=True)]
    return sum(float(one.memory_full_info().uss) for one in everyone) / 2**20


def rss_mib(process: psutil.Process) -> float:
    everyone = [process, *process.children(recursive=True)]
    return sum(float(one.memory_info().rss) for one in everyone) / 2**20
