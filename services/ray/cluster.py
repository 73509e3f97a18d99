"""All of Baton's calls to Ray (serve.py has those to Ray Serve).

Uses Ray 2.60's ray.init, ray.nodes, ray.util.placement_group, NodeAffinitySchedulingStrategy,
PlacementGroupSchedulingStrategy. A bundle keeps the same GPUs, so a short task in it can look up their
numbers and no actor needs to hold them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.services.errors import StartError

LOCAL = "local"  # an address that starts a cluster on this machine, for this process alone
OBJECT_STORE_BYTES = 80_000_000  # about Ray's minimum; Baton passes no objects through its store
_LOOPBACK = "127.0.0.1"
TIMEOUT_S = 30.0  # timeout of calls to Ray's control service and actors


@dataclass(frozen=True)
class Machine:
    """A live node of the cluster."""

    id: str
    name: str  # its host's name
    address: str


@dataclass(frozen=True)
class Place:
    """A placement group's state and nodes."""

    state: str  # PENDING, CREATED, RESCHEDULING, REMOVED
    nodes: tuple[str, ...] = ()  # the id of each bundle's node, once created


def connect(address: str) -> bool:
    """Connect to a Ray cluster: `local`, `auto` or host:port. Return False if already connected.

    A local cluster ends with this process. Raises StartError.
    """
    # No usage reports, unless the user has turned them on.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == LOCAL:  # otherwise engines would run at a low priority
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
    """Disconnect. Everything that this process created there ends, including a local cluster."""
    import ray

    ray.shutdown()


def here() -> str:
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


def machines(*, loopback: bool) -> dict[str, Machine]:
    """Return the live nodes by id. `loopback`: give them a loopback address."""
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
    """Start an actor that reserves no resources, on `node` if given. Ray restarts it when it dies.

    Calls of its methods return Ray's references.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if node:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_restarts=-1)(kind).options(**options).remote(*arguments)


def named(name: str, namespace: str) -> Any:
    """Return the actor with this name, or None."""
    import ray

    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


def kill(one: Any) -> None:
    import ray

    ray.kill(one)


def reserve(name: str, bundles: Sequence[Mapping[str, float]], labels: Mapping[str, str]) -> Any:
    """Create a placement group for one worker or gang, with each bundle on a node of its own.

    Ray places it once there is room, and again if a node dies.
    """
    from ray.util import placement_group

    selectors = [dict(labels)] * len(bundles) if labels else None
    strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
    return placement_group(
        [dict(one) for one in bundles], strategy, name=name, bundle_label_selector=selectors
    )


def give_up(group: Any) -> None:
    from ray.util import remove_placement_group

    remove_placement_group(group)


def ask_for(bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> None:
    """Tell Ray's autoscaler, if there is one, which bundles the cluster must have room for.

    `labels`: required labels of each bundle's node. Replaces all earlier requests on this cluster.
    """
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles, bundle_label_selectors=labels)


def places() -> dict[str, Place]:
    from ray.util import placement_group_table

    found = {}
    for key, entry in placement_group_table().items():
        nodes = entry["bundles_to_node_id"] if entry["state"] == "CREATED" else {}
        found[key] = Place(entry["state"], tuple(nodes[bundle] for bundle in sorted(nodes)))
    return found


def visible(group: Any, bundle: Mapping[str, float], number: int = 0) -> Any:
    """Return a reference to the environment variables that show the devices of a group's bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = bundle.get("GPU", 0)
    task = ray.remote(num_cpus=0, num_gpus=gpus, max_retries=0)(_visible)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    return task.options(scheduling_strategy=strategy).remote()


def get(references: list[Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Return the references' values in order, with None for each that failed or is late."""
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
        except RayError:  # the actor or its node is dead or silent (GetTimeoutError is one of these)
            found.append(None)
    return found


def ended(references: list[Any]) -> bool:
    """Return whether each reference has a value or has failed."""
    import ray

    return not ray.wait(references, num_returns=len(references), timeout=0)[1]


def _visible() -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
