"""The nodes in use by a deployment on Ray, each with its keeper; where routers run; how parts are ended."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.services.fleet.parts import STOP_TIMEOUT_S
from baton.services.ray import cluster
from baton.services.ray.cluster import Machine
from baton.services.ray.config import WORKER_ROLES, ClusterSettings
from baton.services.ray.keeper import Report
from baton.services.ray.turns import TURN_S

ANSWER_S = 2.0  # longest wait for keepers in one turn; a slower node is read in a later turn


@dataclass
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
        """Whether no part runs or should run on this node, by the keeper's last report."""
        return self.parts == [] and self.report.order == self.order and not self.report.states


def failed_start(machine: str, report: Report) -> str:
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


def end_in_order(nodes: Collection[Node], settings: ClusterSettings) -> None:
    """Drain routers, then workers, then the scheduler."""
    drains = settings.router.drain_timeout_s, settings.worker.drain_timeout_s, 0.0
    for kinds, drain_s in zip((("router",), WORKER_ROLES, ("scheduler",)), drains, strict=True):
        for node in nodes:
            node.parts = [part for part in node.parts or [] if part["role"] not in kinds]
            node.order += 1
            node.keeper.run.remote(node.order, node.parts)
        deadline = time.monotonic() + drain_s + STOP_TIMEOUT_S
        while time.monotonic() < deadline and not _all_ended(nodes):
            time.sleep(TURN_S / 5)


def _all_ended(nodes: Collection[Node]) -> bool:
    """Return whether only ordered parts run on the nodes that answer."""
    reports = cluster.get([node.keeper.report.remote() for node in nodes], ANSWER_S)
    return all(
        report.order >= node.order and set(report.states) <= {part["name"] for part in node.parts or []}
        for node, report in zip(nodes, reports, strict=True)
        if report
    )
