"""A deployment on a Ray cluster: the loop that makes running parts match the wanted ones.

Twice a second it checks where Ray placed each worker, tells each node's keeper which parts to run, collects
reports, and asks Baton's scheduler which workers are ready. This process owns everything: when it ends, for
whatever reason, Ray ends all parts on every node.

The numbers of workers come from `scale`, or from the scheduler's orders if `autoscale.mode` is on.

A turn costs one call to each node in use, three to Ray (nodes, placement groups, desk) and one to the
scheduler. A keeper gets its parts only when they change. The scheduler's orders are fetched once a second.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, Self

from baton import addresses
from baton.enums import role_name, state_name
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.services.errors import ServiceError, StartError, describe
from baton.services.fleet.node import PartOrder
from baton.services.fleet.watch import healthy
from baton.services.ray import cluster
from baton.services.ray.cluster import Machine
from baton.services.ray.config import WORKER_ROLES, ClusterSettings
from baton.services.ray.desk import NAME, Desk, checked, namespace
from baton.services.ray.gangs import members_of
from baton.services.ray.nodes import ANSWER_S, Node, Nodes, place_routers
from baton.services.ray.orders import OrderedWorkers, Room
from baton.services.ray.pauses import TURN_S, Pauses
from baton.services.ray.slots import Slot, Slots
from baton.services.ray.trust import Trust

START_FAILS_S = 30.0  # a start is given up after turns have failed for this long
READY_TIMEOUT_S = 1800.0  # a cluster may first have to start machines
STILL_WAITING_S = 10.0

Tell = Callable[[str, str], None]  # a part's name, an event


class Deployment:
    """A running deployment, made by `baton.ray.deploy`."""

    def __init__(
        self, settings: ClusterSettings, *, loopback: bool, log_dir: str = "", tell: Tell | None = None
    ) -> None:
        """Start on the connected cluster and return at once; see `wait_ready`.

        `loopback`: no other machine can reach the parts. Raises StartError if a deployment of this topic
        is already running there.
        """
        self.settings = settings
        self._loopback = loopback
        self._tell: Tell = tell or (lambda _name, _text: None)
        self._name = namespace(settings.scheduler.topic)
        if cluster.named(NAME, self._name) is not None:
            raise StartError(
                f"a deployment of topic {settings.scheduler.topic!r} runs on this cluster: `baton ray down` "
                "ends it; or set scheduler.topic"
            )
        self._home = cluster.here()
        # It runs on this node, so the death of another node cannot affect it.
        self._desk = cluster.actor(Desk, node=self._home, name=NAME, namespace=self._name)
        self._numbers = {role: settings.deploying(role).initial for role in WORKER_ROLES}
        self._chosen = OrderedWorkers(settings) if settings.autoscale.mode == "on" else None
        self._room = Room()
        self._slots = Slots(settings, self._name, self._tell)
        self._nodes = Nodes(os.path.abspath(log_dir) if log_dir else "", self._tell)
        self._machines: dict[str, Machine] = {}
        self._routers: dict[str, str] = {}  # name -> node's id
        self._healthy: set[str] = set()  # routers
        self._checked: set[str] = set()  # routers whose port was checked before their first start
        self._workers: dict[str, str] = {}  # name -> state at the scheduler
        self._trees: dict[tuple[str, str], dict[str, Any]] = {}
        self._orders_taken = 0  # number of the desk's last order that was taken
        self._stopping = threading.Event()
        self._lock = threading.RLock()  # guards what `scale` and the loop both change
        self._failure = ""
        self._ready = False
        self.ended = False  # set by `baton ray down` or a failure
        try:
            self.scheduler_address = self._place_scheduler()
            self._trust = Trust(settings, self._machines[self._home].address)
        except BaseException:
            cluster.kill(self._desk)
            raise
        self._thread = threading.Thread(target=self._loop, name="baton ray", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def urls(self) -> list[str]:
        """The routers' URLs; routers that answer come first."""
        with self._lock:
            names = sorted(self._routers, key=lambda name: (name not in self._healthy, name))
            return [self._url(self._routers[name]) for name in names if self._routers[name] in self._machines]

    def scale(
        self, *, prefill: int | None = None, decode: int | None = None, encode: int | None = None
    ) -> None:
        """Set the numbers of workers. Surplus workers are drained; new ones start where there is room.

        Returns at once. Raises ServiceError if a number is outside the configuration's limits, or if the
        scheduler chooses the numbers.
        """
        bounds = {role: self.settings.bounds(role) for role in WORKER_ROLES}
        asked = {"prefill": prefill, "decode": decode, "encode": encode}
        numbers = checked(asked, bounds, decided=self._chosen is not None)
        with self._lock:
            self._numbers |= numbers

    def status(self) -> dict[str, Any]:
        """Return the nodes, and the parts with their states, as JSON."""
        with self._lock:
            return self._status()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S, stop: threading.Event | None = None) -> None:
        """Wait until every part is ready, or `stop` is set. Raises StartError when one cannot start."""
        deadline = time.monotonic() + timeout_s
        spoke, waited = time.monotonic(), ""
        while not self._ready and not (stop and stop.is_set()):
            if self.ended:
                raise StartError(self._failure or "the deployment was ended while it started")
            lacking = ", ".join(self._lacking())
            now = time.monotonic()
            if now > deadline:
                raise StartError(f"not ready after {timeout_s:.0f} s: {lacking}")
            if lacking != waited:
                spoke, waited = now, lacking
            elif now - spoke > STILL_WAITING_S:
                self._tell("still", f"waiting for {lacking}")
                spoke = now
            time.sleep(TURN_S / 5)

    def wait(self, stop: threading.Event) -> None:
        """Wait until `stop` is set, or the deployment ends. Raises ServiceError when it failed."""
        while not stop.wait(TURN_S):
            if self.ended:
                if self._failure:
                    raise ServiceError(self._failure)
                return

    def close(self) -> None:
        """Drain and end all parts: routers first, the scheduler last. Idempotent."""
        self._stopping.set()
        self._thread.join(60.0)
        self._nodes.end(self.settings)
        self._slots.close()
        self._room.leave()
        cluster.kill(self._desk)

    def _loop(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001 (the CA or a bug: the owner must not wait forever)
            self._failure, self.ended = describe(error), True

    async def _run(self) -> None:
        pauses = Pauses(self._tell)
        async with self._trust, SchedulerClient(self.scheduler_address) as client:
            while not self._stopping.is_set() and not self.ended:
                try:
                    await asyncio.to_thread(self._turn)
                    await self._look(client)
                    if self._chosen and self._ready:
                        await self._chosen.ask(client)
                    wait_s = pauses.went_well()
                except Exception as error:  # noqa: BLE001 (Ray may be down, and running parts do not need the loop)
                    wait_s = pauses.failed(error)
                    if pauses.failing_s >= START_FAILS_S and not self._ready:
                        self._failure, self.ended = f"{type(error).__name__}: {error}", True
                await asyncio.sleep(wait_s)

    def _turn(self) -> None:
        machines = cluster.machines(loopback=self._loopback)
        with self._lock:
            self._machines = machines
            self._nodes.drop_dead(machines)
            self._slots.match(self._chosen.roles if self._chosen else self._slots.by_number(self._numbers))
            self._slots.locate(cluster.places(), machines)
            if self._chosen:
                wanted = [slot for slot in self._slots if not slot.leaving for _ in range(slot.count)]
                self._room.want([(slot.bundle, slot.labels) for slot in wanted])
            self._place_routers()
            orders = self._orders()
        if why := self._port_taken():
            self._failure, self.ended = why, True
            return
        self._nodes.order(orders)
        if (why := self._nodes.hear()) and not self._ready:
            self._failure, self.ended = why, True
        with self._lock:
            self._slots.let_go(self._nodes.busy)
            self._nodes.drop_idle()
            status = self._status()
        (ordered,) = cluster.get([self._desk.publish.remote(status)], ANSWER_S)
        if ordered is not None:
            count, numbers, down = ordered
            if count != self._orders_taken and numbers and not self._chosen:
                self.scale(**numbers)
            self._orders_taken = count
            self.ended = self.ended or down

    def _place_routers(self) -> None:
        """Place the wanted number of routers, at most one per node, the first on this node."""
        number = self.settings.deploying("router").initial
        was, self._routers = self._routers, place_routers(self._routers, self._machines, self._home, number)
        for name, node in self._routers.items():
            if was.get(name) != node:
                self._healthy.discard(name)
                self._tell(name, f"goes to {self._machines[node].name}")

    def _port_taken(self) -> str:
        """Return why a router cannot listen at the start, or "". Another program might answer on its port."""
        new = {name: node for name, node in self._routers.items() if name not in self._checked}
        self._checked.update(new)
        if not new or self._ready:  # a later router may be given up, as others serve
            return ""
        port, found = self.settings.router.port, []
        for node in new.values():
            host = self._tree("router", self._machines[node])["router"]["host"]
            keeper = self._nodes.at(self._machines[node]).keeper
            found.append(keeper.why_not.remote("router.port", host, port))
        for node, why in zip(new.values(), cluster.get(found), strict=True):
            if why:
                return f"{self._machines[node].name}: {why}"
        return ""

    def _orders(self) -> dict[Node, list[PartOrder]]:
        orders: dict[Node, list[PartOrder]] = {}

        def put(part: PartOrder, node: str, runtime_env: Mapping[str, Any] = MappingProxyType({})) -> None:
            orders.setdefault(self._nodes.at(self._machines[node], runtime_env), []).append(part)

        put(self._ordered("scheduler", "scheduler", self._home), self._home)
        for name, node in self._routers.items():
            put(self._ordered(name, "router", node), node)
        for slot in self._slots:
            for number, node in enumerate(slot.nodes if slot.starts else ()):
                place = self._placed(slot, number)
                for part in members_of(place, number):
                    put(part, node, self.settings.workers(slot.side).runtime_env)
        return orders

    async def _look(self, client: SchedulerClient) -> None:
        """Ask the scheduler which workers are ready, and check the routers."""
        try:
            description = await client.describe()
        except SchedulerError:
            return
        was = self._workers
        self._workers = {one.identity.name: state_name(one.state) for one in description.workers}
        ready = {name for name, state in self._workers.items() if state == "ready"}
        for one in description.workers:
            name = one.identity.name
            if name in ready and was.get(name) != "ready":
                self._tell(name, f"ready: {one.identity.address}{self._slots.back(name, ready)}")
        with self._lock:
            self._follow({one.identity.name: role_name(one.identity.role) for one in description.workers})
        states = self._nodes.states
        for name, node in list(self._routers.items()):
            if states.get(name) != "running":
                self._healthy.discard(name)
                continue
            if name in self._healthy or node not in self._machines:
                continue
            if await asyncio.to_thread(healthy, f"{self._url(node)}/health"):
                self._healthy.add(name)
                self._tell(name, f"ready: {self._url(node)}")
        if not self._ready:
            self._ready = not self._lacking() and bool(self._slots)

    def _follow(self, roles_by_name: dict[str, str]) -> None:
        """Adopt role changes by the scheduler or an operator, and adjust the wanted numbers."""
        for slot, former in self._slots.follow(roles_by_name):
            self._numbers[former] = max(0, self._numbers[former] - 1)
            self._numbers[slot.role] += 1

    def _place_scheduler(self) -> str:
        """Start this node's keeper, and return the scheduler's future address."""
        self._machines = cluster.machines(loopback=self._loopback)
        machine = self._machines[self._home]
        (port,) = cluster.get([self._nodes.at(machine).keeper.port.remote(machine.address)])
        if port is None:
            raise StartError(f"the actor on this node ({machine.name}) does not answer: see Ray's logs")
        return addresses.join(machine.address, port)

    def _placed(self, slot: Slot, number: int) -> PartOrder:
        """Return the order for a slot's processes on one of its nodes."""
        one = self._ordered(slot.name, slot.role, slot.nodes[number], slot.side)
        environment = (slot.environments or [{}] * slot.count)[number]
        return replace(one, environment=environment, cores=max(1, round(slot.bundle.get("CPU", 1.0))))

    def _ordered(self, name: str, role: str, node: str, side: str = "") -> PartOrder:
        key = side or role, node
        self._trees[key] = self._trees.get(key) or self._tree(key[0], self._machines[node])
        return PartOrder(name, role, self._trees[key])

    def _tree(self, role: str, machine: Machine) -> dict[str, Any]:
        """Return the settings of a role's parts on a node, with addresses that other nodes can reach."""
        tree = self.settings.tree_of(role)
        tree["scheduler"]["address"] = self.scheduler_address
        tree["security"] = self._trust.section(role)
        tree["worker"]["listen"] = addresses.join(machine.address, 0)
        if "host" not in self.settings.router.model_fields_set:
            tree["router"]["host"] = machine.address
        return tree

    def _url(self, node: str) -> str:
        router = self.settings.router
        given = router.host if "host" in router.model_fields_set else ""
        host = self._machines[node].address if not given or addresses.is_wildcard(given) else given
        return f"http://{addresses.join(host, router.port)}"

    def _lacking(self) -> list[str]:
        return [
            f"{part['name']} ({part['state']})" for part in self.status()["parts"] if part["state"] != "ready"
        ]

    def _status(self) -> dict[str, Any]:
        states = self._nodes.states
        told = [
            (name, slot.role, node, self._state(slot, worker, node, states.get(name, "")))
            for slot in self._slots
            for name, worker, node in slot.seats
        ]
        told += [
            (name, "router", node, "ready" if name in self._healthy else states.get(name, "starting"))
            for name, node in self._routers.items()
        ]
        parts = [
            {"name": name, "role": role, "node": self._name_of(node), "state": state}
            for name, role, node, state in told
        ]
        return {
            "model": self.settings.model,
            "topic": self.settings.scheduler.topic,
            "scheduler": self.scheduler_address,
            "urls": self.urls,
            "autoscale": self.settings.autoscale.mode,
            "wanted": self._chosen.numbers if self._chosen else dict(self._numbers),
            "bounds": {role: list(self.settings.bounds(role)) for role in WORKER_ROLES},
            "nodes": [
                {"name": one.name, "address": one.address, "id": one.id} for one in self._machines.values()
            ],
            "logs": {node.machine.name: node.report.log_dir for node in self._nodes},
            "parts": parts,
        }

    def _name_of(self, node: str) -> str:
        return self._machines[node].name if node in self._machines else ""

    def _state(self, slot: Slot, worker: str, node: str, local: str) -> str:
        if slot.leaving:
            return "draining"
        if not node:
            return slot.waits
        if self._nodes.is_silent(node):
            return f"{self._name_of(node)} does not answer"
        if local == "running":
            return self._workers.get(worker, "starting")
        return local or "starting"
