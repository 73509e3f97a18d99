"""All that Baton asks of Ray, and the only import of it.

Leans on Ray 2.60: ray.init, ray.nodes, ray.util.placement_group, NodeAffinitySchedulingStrategy,
PlacementGroupSchedulingStrategy. A bundle keeps the very GPUs that it was given, so a short task in it learns
their numbers, and nobody holds an actor for them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.services.errors import StartError

LOCAL = "local"  # the address that stands for a cluster of this machine alone, made for this process
OBJECT_STORE_BYTES = (
    80_000_000  # Baton passes no objects through Ray's store; this is about the least it takes
)
_LOOPBACK = "127.0.0.1"
TIMEOUT_S = 30.0  # for an answer of Ray's control service or of an actor


@dataclass(frozen=True)
class Machine:
    """A node of the cluster that is alive."""

    id: str
    name: str  # its host's
    address: str


@dataclass(frozen=True)
class Place:
    """A placement group's present place."""

    state: str  # PENDING, CREATED, RESCHEDULING, REMOVED
    node: str = ""  # the node's id, once created


def connect(address: str) -> bool:
    """Connect this process to a Ray cluster: `local`, `auto` or host:port. Return False if it was before.

    A local cluster ends with this process. Raises StartError, one line.
    """
    # Ray reports how it is used to its makers unless it is told not to: that is the user's to choose.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == LOCAL:  # engines must not give way to everything else on this machine
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError as error:
        raise StartError(f"Ray is not installed ({error}): pip install 'baton[ray]'") from None
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == LOCAL:
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        reason = " ".join(str(error).split())
        where = "none could be started here" if address == LOCAL else f"--address {address}"
        raise StartError(f"no Ray cluster ({where}): {reason[:400]}") from None
    return True


def disconnect() -> None:
    """Leave the cluster; what this process made there ends, a local cluster too."""
    import ray

    ray.shutdown()


def here() -> str:
    """Return the id of this process's node."""
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


def machines(*, loopback: bool) -> dict[str, Machine]:
    """Return the nodes that are alive, by id; with `loopback` at the address that only their machine has."""
    import ray

    return {
        node["NodeID"]: Machine(
            node["NodeID"],
            node["NodeManagerHostname"],
            _LOOPBACK if loopback else node["NodeManagerAddress"],
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def actor(kind: type, *arguments: Any, node: str = "", **options: Any) -> Any:
    """Start an actor that takes no resources, on the node of this id; Ray restarts it when it dies there.

    Calls of its methods return references, as Ray's do.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if node:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_restarts=-1)(kind).options(**options).remote(*arguments)


def named(name: str, namespace: str) -> Any:
    """Return the actor of that name; None if there is none."""
    import ray

    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


def kill(one: Any) -> None:
    """End an actor for good."""
    import ray

    ray.kill(one)


def reserve(name: str, bundle: Mapping[str, float], labels: Mapping[str, str]) -> Any:
    """Ask for room for one worker; Ray finds it now or later, and again when its node dies."""
    from ray.util import placement_group

    selectors = [dict(labels)] if labels else None
    return placement_group([dict(bundle)], "STRICT_PACK", name=name, bundle_label_selector=selectors)


def give_up(group: Any) -> None:
    """Give a placement group's room back."""
    from ray.util import remove_placement_group

    remove_placement_group(group)


def ask_for(bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> None:
    """Tell Ray's autoscaler, if the cluster has one, for which bundles there shall be nodes, in use or free.

    `labels`: what the nodes of each must have. Replaces what was asked before, by anybody on this cluster.
    """
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles, bundle_label_selectors=labels)


def places() -> dict[str, Place]:
    """Return where each placement group is, by its id."""
    from ray.util import placement_group_table

    found = {}
    for key, entry in placement_group_table().items():
        nodes = entry["bundles_to_node_id"]
        found[key] = Place(entry["state"], nodes.get(0, "") if entry["state"] == "CREATED" else "")
    return found


def visible(group: Any, bundle: Mapping[str, float]) -> Any:
    """Return a reference to the variables that show a worker the devices of its bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = bundle.get("GPU", 0)
    task = ray.remote(num_cpus=0, num_gpus=gpus, max_retries=0)(_visible)
    return task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote()


def get(references: list[Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Return the values of references in order, None for one that failed or does not come in time."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    if not references:
        return []
    ray.wait(references, num_returns=len(references), timeout=timeout_s)
    found = []
    for one in references:
        try:
            found.append(ray.get(one, timeout=0))
        except RayTaskError:  # an exception in our own code
            raise
        except RayError:  # the actor or its node is dead, or does not answer: GetTimeoutError is one of them
            found.append(None)
    return found


def _visible() -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
