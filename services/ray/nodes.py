"""The nodes in use by a deployment on Ray, each with its keeper; where routers run; how parts are ended."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from baton.services.fleet.node import PartOrder
from baton.services.fleet.parts import STOP_TIMEOUT_S, Say
from baton.services.ray import cluster
from baton.services.ray.cluster import Machine
from baton.services.ray.config import WORKER_ROLES, ClusterSettings
from baton.services.ray.keeper import Keeper, Report
from baton.services.ray.pauses import TURN_S

ANSWER_S = 2.0  # longest wait for keepers in one turn; a slower node is read in a later turn
SILENT_S = 3.0  # a node silent for this long is shown as not answering; Ray notices later


@dataclass(eq=False)
class Node:
    machine: Machine
    keeper: Any
    order: int = -1  # number of the last order sent
    parts: list[dict[str, Any]] | None = None  # sent with that order; None: it must be sent again
    report: Report = field(default_factory=lambda: Report(-1))
    heard: float | None = None  # time.monotonic of its last answer; None before the first
    silent: bool = False

    @property
    def idle(self) -> bool:
        """Whether no part runs or should run on this node, according to the keeper's last report."""
        return self.parts == [] and self.report.order == self.order and not self.report.states


class Nodes:
    """The nodes in use, one for each machine and runtime environment. Not thread-safe."""

    def __init__(self, log_dir: str, say: Say) -> None:
        """Let keepers log to `log_dir`, a folder on each machine; "": a temporary one."""
        self._log_dir = log_dir
        self._say = say
        self._all: dict[tuple[str, str], Node] = {}  # (machine's id, runtime environment) -> node

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._all.values()))

    def at(self, machine: Machine, runtime_env: Mapping[str, Any] = MappingProxyType({})) -> Node:
        """Return the node on a machine with this runtime environment; start its keeper if it is new."""
        key = machine.id, repr(sorted(runtime_env.items()))
        if key not in self._all:
            options = {"runtime_env": dict(runtime_env)} if runtime_env else {}
            keeper = cluster.actor(Keeper, self._log_dir, os.getcwd(), node=machine.id, **options)
            self._all[key] = Node(machine, keeper)
        return self._all[key]

    @property
    def states(self) -> dict[str, str]:
        """The states of all parts, according to the keepers' last reports."""
        return {name: state for node in self for name, state in node.report.states.items()}

    @property
    def busy(self) -> set[str]:
        """The names of parts that run or should run."""
        return {*self.states, *(part["name"] for node in self for part in node.parts or [])}

    def is_silent(self, machine: str) -> bool:
        return any(node.silent and node.machine.id == machine for node in self)

    def drop_dead(self, machines: Collection[str]) -> None:
        for key in [key for key in self._all if key[0] not in machines]:
            self._say(self._all.pop(key).machine.name, "this node is dead")

    def drop_idle(self) -> None:
        """End the keepers of nodes without parts: Ray's autoscaler keeps a node that has an actor."""
        for key in [key for key, node in self._all.items() if node.idle]:
            cluster.kill(self._all.pop(key).keeper)

    def order(self, orders: Mapping[Node, Sequence[PartOrder]]) -> None:
        """Send the nodes their parts if those changed or the keeper lost them."""
        for node in self:
            parts = [one.to_json() for one in orders.get(node, ())]
            if parts != node.parts:
                node.order, node.parts = node.order + 1, parts
                node.keeper.run.remote(node.order, parts)

    def hear(self) -> str:
        """Collect reports; return why a part cannot start, or ""."""
        nodes, why = list(self), ""
        reports = cluster.get([node.keeper.report.remote() for node in nodes], ANSWER_S)
        now = time.monotonic()
        for node, report in zip(nodes, reports, strict=True):
            if report is None:
                if node.heard is not None and now - node.heard > SILENT_S and not node.silent:
                    node.silent = True
                    self._say(node.machine.name, "does not answer; its workers move when Ray finds it dead")
                continue
            node.heard, node.silent = now, False
            for name, text in report.said:
                self._say(name, text)
            why = _failed_start(node.machine.name, report) or why
            if report.order != node.order:  # the keeper was restarted
                node.parts = None
            node.report = report
        return why

    def end(self, settings: ClusterSettings) -> None:
        """Drain routers, then workers, then the scheduler, and end the keepers."""
        if not self._all:
            return
        drains = settings.router.drain_timeout_s, settings.worker.drain_timeout_s, 0.0
        for kinds, drain_s in zip((("router",), WORKER_ROLES, ("scheduler",)), drains, strict=True):
            for node in self:
                node.parts = [part for part in node.parts or [] if part["role"] not in kinds]
                node.order += 1
                node.keeper.run.remote(node.order, node.parts)
            deadline = time.monotonic() + drain_s + STOP_TIMEOUT_S
            while time.monotonic() < deadline and not self._all_ended():
                time.sleep(TURN_S / 5)
        cluster.get([node.keeper.end.remote() for node in self])
        self._all.clear()

    def _all_ended(self) -> bool:
        """Return whether only ordered parts run on the nodes that answer."""
        reports = cluster.get([node.keeper.report.remote() for node in self], ANSWER_S)
        return all(
            report.order >= node.order and set(report.states) <= {part["name"] for part in node.parts or []}
            for node, report in zip(self, reports, strict=True)
            if report
        )


def _failed_start(machine: str, report: Report) -> str:
    """Return why a part cannot start on a node, or ""."""
    if report.failed:
        return f"{machine}: {report.failed}"
    given_up = next((name for name, state in report.states.items() if state == "given up"), "")
    return given_up and f"{given_up} could not start; its log: {machine}:{report.log_dir}/{given_up}.log"


def place_routers(
    there: Mapping[str, str], machines: Mapping[str, Machine], home: str, number: int
) -> dict[str, str]:
    """Return each router's node: its current one if that is alive, else one without a router, `home` first.

    All routers use one port, so a node has at most one. Routers without a node are left out.
    """
    placed = {name: node for name, node in there.items() if node in machines}
    free = [node for node in machines if node not in placed.values()]
    free.sort(key=lambda node: (node != home, machines[node].name, node))
    missing = [name for at in range(number) if (name := f"router-{at}") not in placed]
    return placed | dict(zip(missing, free, strict=False))
