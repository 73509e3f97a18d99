"""The processes of a deployment, and their memory."""

from __future__ import annotations

from pathlib import Path

import psutil

from baton.protos import scheduler_pb2
from harness.deployment import Deployment


def processes(one: Deployment) -> dict[str, psutil.Process]:
    """Return the processes by name: the router, the scheduler and each worker."""
    found = {"scheduler": one.scheduler_process()}
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == one.port and connection.pid:
            found["router"] = psutil.Process(connection.pid)
    for worker in one.describe().workers:
        role = scheduler_pb2.Role.Name(worker.identity.role).removeprefix("ROLE_").lower()
        number = sum(name.startswith(role) for name in found)
        found[f"{role} {number}"] = one.worker_process(worker.identity.worker_id)
    return found


def anonymous_mib(process: psutil.Process) -> float:
    """Return the anonymous memory of this process and its children in MiB: no files, no KV segments.

    What a fork inherited counts from the beginning: a page of that which is written first is no growth.
    """
    everyone = [process, *process.children(recursive=True)]
    return sum(_anonymous_kib(one.pid) for one in everyone) / 2**10


def _anonymous_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def rss_mib(process: psutil.Process) -> float:
    everyone = [process, *process.children(recursive=True)]
    return sum(float(one.memory_info().rss) for one in everyone) / 2**20
