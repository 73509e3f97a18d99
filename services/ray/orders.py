"""Autoscaling on Ray: the scheduler orders which worker runs in which place (docs/autoscaling.md).

The places are names of workers. If prefill and decode workers have the same settings, a place may run either
role, and a worker may change its role; otherwise a place belongs to one role, as those for encode workers
always do. An order lists all workers that should run. Without an answer nothing changes.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Sequence

from baton.scheduler.client import SchedulerClient
from baton.services.fleet.watch import orders_of
from baton.services.ray import cluster
from baton.services.ray.config import SIDES, WORKER_ROLES, ClusterSettings

ORDERS_S = 1.0  # between two calls for orders
ROOM_S = 5.0  # between two messages to Ray's autoscaler


class OrderedWorkers:
    """The places, and the workers that should run in them."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Make as many places as the limits allow, the initial ones named after roles."""
        first = {
            role: [f"{role}-{at}" for at in range(settings.deploying(role).initial)] for role in WORKER_ROLES
        }
        most = {role: settings.bounds(role)[1] or 0 for role in SIDES}
        most_encode = settings.scaling.bounds("encode")[1]
        self._fixed = {} if most_encode else dict.fromkeys(first["encode"], "encode")
        scaled = WORKER_ROLES if most_encode else SIDES
        self._ordered = {name: role for role in scaled for name in first[role]}
        own = {"encode": most_encode}
        if settings.interchangeable:
            names = [name for role in SIDES for name in first[role]]
            names += [f"worker-{at}" for at in range(len(names), sum(most.values()))]
            self._places = dict.fromkeys(names, "")  # place -> its role; "": prefill or decode
        else:
            self._places, own = {}, most | own
        self._places |= {f"{role}-{at}": role for role, number in own.items() for at in range(number)}
        self._id = f"ray-{socket.gethostname()}-{os.getpid()}"
        self._fence = 0
        self._asked = -math.inf

    async def ask(self, client: SchedulerClient) -> None:
        """Fetch orders, about once a second. Ignore those of a scheduler that no longer decides."""
        now = time.monotonic()
        if now - self._asked < ORDERS_S:
            return
        self._asked = now
        found = await orders_of(client, self._id, self._places)
        if found and found[0] >= self._fence:
            self._fence, ordered = found
            self._ordered = {name: role for name, role in ordered.items() if name in self._places}

    @property
    def roles(self) -> dict[str, str]:
        """The roles of all wanted workers, by name."""
        return self._ordered | self._fixed

    @property
    def numbers(self) -> dict[str, int]:
        wanted = list(self.roles.values())
        return {role: wanted.count(role) for role in WORKER_ROLES}


class Room:
    """The request to Ray's autoscaler for nodes with room for all wanted workers.

    It lets a cluster add nodes at once, and remove those whose workers have left.
    """

    def __init__(
        self, ask: Callable[[list[dict[str, float]], list[dict[str, str]]], None] = cluster.ask_for
    ) -> None:
        self._ask = ask
        self._asked: list[tuple[dict[str, float], dict[str, str]]] = []
        self._at = -math.inf

    def want(self, wanted: Sequence[tuple[dict[str, float], dict[str, str]]]) -> None:
        """Request these bundles, each with its node's labels, if they changed; at most every `ROOM_S`."""
        new, now = sorted(wanted, key=repr), time.monotonic()
        if new == self._asked or now - self._at < ROOM_S:
            return
        self._ask([bundle for bundle, _ in new], [labels for _, labels in new])
        self._asked, self._at = new, now

    def leave(self) -> None:
        """Withdraw the request, or Ray would keep the nodes."""
        if self._asked:
            self._ask([], [])
            self._asked = []
