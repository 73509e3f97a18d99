"""Watch a deployment: a small process polls the scheduler and the router and reports which parts are ready.

If the scheduler chooses the numbers of workers, the watcher also fetches its orders. It is a separate process
because gRPC runs threads, and the supervisor must be able to fork at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from multiprocessing.connection import Connection

from baton import plain_http
from baton.enums import role_name
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.roles import role

POLL_S = 0.1
CALM_POLL_S = 1.0  # once the router is ready, only restarts are left to report


@dataclass(frozen=True)
class Watched:
    scheduler: str  # its address
    health_url: str  # the router's /health for this model
    prefix: str = ""  # prefix of the names of the model's processes
    # The places for which the scheduler gives orders, and the role to which each belongs ("": prefill or
    # decode). None without autoscaling.
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    name: str  # the router, a model's scheduler, or a worker's id
    detail: str  # shown to users
    at: float  # time.monotonic, before the poll; one clock for all processes of a machine


@dataclass(frozen=True)
class Ordered:
    """A scheduler's orders: everything that should run in a fleet's places."""

    prefix: str  # prefix of the names of the model's parts
    fence: int  # rises when another scheduler decides
    roles: dict[str, str]  # place -> the role with which its worker starts


def scheduler_names(number: int, prefix: str = "") -> list[str]:
    """Return the names of a model's schedulers, in the order of their addresses."""
    if number == 1:
        return [f"{prefix}scheduler"]
    return [f"{prefix}scheduler-{one}" for one in range(number)]


def watch(models: Sequence[Watched], router: str, events: Connection) -> None:
    """Send all ready parts to `events` at each poll, until this process is stopped.

    Each poll sends all of them, because a part may have been replaced since the last one. The router (a URL)
    is ready when it can serve all models, and stays ready while it can serve one. Orders are sent for a model
    that is served and has places.
    """
    asyncio.run(_watch(models, router, events))


async def _watch(models: Sequence[Watched], router: str, events: Connection) -> None:
    fleet_id = f"{socket.gethostname()}-{os.getppid()}"  # the supervisor's pid: a watcher may be restarted
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(SchedulerClient(one.scheduler)) for one in models]
        began = False  # all models have been served
        while True:
            at = time.monotonic()
            looks = (_look(client, one.prefix) for one, client in zip(models, clients, strict=True))
            seen = [part for each in await asyncio.gather(*looks) for part in each]
            asks = (asyncio.to_thread(healthy, one.health_url) for one in models)
            served = await asyncio.gather(*asks)
            began = began or all(served)
            calm = began and any(served)
            if calm:
                seen.append(Seen("router", router, at))
            for part in seen:
                events.send(part)
            for one, client, is_served in zip(models, clients, served, strict=True):
                if is_served and one.places and (found := await orders_of(client, fleet_id, one.places)):
                    events.send(Ordered(one.prefix, *found))
            await asyncio.sleep(CALM_POLL_S if calm else POLL_S)


async def orders_of(
    client: SchedulerClient, fleet_id: str, places: Mapping[str, str]
) -> tuple[int, dict[str, str]] | None:
    """Return the fence of a scheduler's orders and each wanted worker's role, by place; None without orders.

    places: as in `Watched`
    """
    asked = [pb.Place(name=name, roles=[role(owner).wire] if owner else []) for name, owner in places.items()]
    try:
        reply = await client.orders(fleet_id, asked)
    except SchedulerError:
        return None
    return (reply.fence, {one.name: role_name(one.role) for one in reply.orders}) if reply.fence else None


async def _look(client: SchedulerClient, prefix: str) -> list[Seen]:
    at = time.monotonic()
    try:
        description = await client.describe()
    except SchedulerError:
        return []
    found = []
    names = dict(zip(client.address.split(","), scheduler_names(client.schedulers, prefix), strict=True))
    for one in description.schedulers:
        away = one.store_problem and f", UNREACHABLE: {one.store_problem}"
        found.append(Seen(names[one.address], f"store {description.store}{away}", at))
    for worker in description.workers:
        capacity = worker.identity.capacity
        loaded = worker.identity.HasField("capacity")
        if worker.state == pb.WORKER_STATE_READY or (worker.drained and loaded):
            room = f"{capacity.num_blocks} blocks of {capacity.block_size} tokens"
            if worker.identity.role == pb.ROLE_ENCODE:
                room = "encodes images"
            drained = ", DRAINED: it takes no requests until `baton undrain`" if worker.drained else ""
            detail = f"{worker.identity.address}, {room}{drained}"
            found.append(Seen(worker.identity.worker_id, detail, at))
    return found


def healthy(url: str) -> bool:
    """Return whether a router answers at its /health that it can serve."""
    try:
        with plain_http.get(url, 1.0) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False
