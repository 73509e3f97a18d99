"""The watcher: a small process that polls the scheduler and the router and reports which parts are ready.

Where the scheduler chooses the numbers of workers, it also asks what shall run in the fleet's places.

It is a process of its own because gRPC runs threads, and the supervisor must be able to fork at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.roles import name_of

POLL_S = 0.1
CALM_POLL_S = 1.0  # once the router is ready: only restarts are left to report


@dataclass(frozen=True)
class Seen:
    """One part that was seen ready."""

    name: str  # scheduler, router, or a worker's id
    detail: str  # for people
    at: float  # time.monotonic, before the poll; one clock for all processes of a machine


@dataclass(frozen=True)
class Ordered:
    """Orders of the scheduler: all that shall run in a fleet's places."""

    fence: int  # of the decider
    roles: dict[str, str]  # place -> the role with which its worker starts


def scheduler_names(number: int) -> list[str]:
    """Return the names of so many schedulers' parts, in the order of their addresses."""
    return ["scheduler"] if number == 1 else [f"scheduler-{one}" for one in range(number)]


def watch(scheduler: str, health_url: str, events: Connection, places: Sequence[str] = ()) -> None:
    """Send every ready part to `events`, in full at each poll, until this process is stopped.

    In full, because a part may have been replaced between two polls. With `places`, also the orders for them,
    once the router is ready.
    """
    asyncio.run(_watch(scheduler, health_url, events, places))


async def _watch(scheduler: str, health_url: str, events: Connection, places: Sequence[str]) -> None:
    fleet_id = f"{socket.gethostname()}-{os.getppid()}"  # the supervisor's, whose watcher may be restarted
    async with SchedulerClient(scheduler) as client:
        while True:
            seen = await _look(client, health_url)
            for one in seen:
                events.send(one)
            calm = any(one.name == "router" for one in seen)
            if calm and places:
                with contextlib.suppress(SchedulerError):  # without an answer all stays as it is
                    reply = await client.orders(fleet_id, [pb.Place(name=name) for name in places])
                    if reply.fence:
                        roles = {one.name: name_of(one.role) for one in reply.orders}
                        events.send(Ordered(reply.fence, roles))
            await asyncio.sleep(CALM_POLL_S if calm else POLL_S)


async def _look(client: SchedulerClient, health_url: str) -> list[Seen]:
    at = time.monotonic()
    try:
        description = await client.describe()
    except SchedulerError:
        return []
    found = []
    names = dict(zip(client.address.split(","), scheduler_names(client.schedulers), strict=True))
    for one in description.schedulers:
        away = one.store_problem and f", UNREACHABLE, serving from memory: {one.store_problem}"
        found.append(Seen(names[one.address], f"store {description.store}{away}", at))
    for worker in description.workers:
        capacity = worker.identity.capacity
        loaded = worker.identity.HasField("capacity")
        if worker.state == pb.WORKER_STATE_READY or (worker.drained and loaded):
            room = f"{capacity.num_blocks} blocks of {capacity.block_size} tokens"
            drained = ", DRAINED: it takes no requests until `baton undrain`" if worker.drained else ""
            detail = f"{worker.identity.address}, {room}{drained}"
            found.append(Seen(worker.identity.worker_id, detail, at))
    if await asyncio.to_thread(_healthy, health_url):
        found.append(Seen("router", health_url.removesuffix("/health"), at))
    return found


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as answer:  # noqa: S310 (our own http URL)
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
