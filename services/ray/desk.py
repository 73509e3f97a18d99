"""The actor that shows a deployment's state to other processes and takes their orders.

The loop (deployment.py) publishes its state here at each turn, and fetches orders. The actor holds only a
copy, so a restart loses at most an order that was not fetched.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from baton.services.errors import ServiceError, StartError
from baton.services.ray import cluster

NAME = "desk"
END_S = 300.0  # longest drain of a deployment
POLL_S = 0.2
WHO_DECIDES = (
    "the scheduler chooses the numbers of workers (autoscale.mode is on), within min_replicas and "
    "max_replicas of autoscaling_config; to set them by hand, start with autoscale.mode off or advise"
)


def checked(
    asked: Mapping[str, int | None], bounds: Mapping[str, Sequence[int | None]], *, decided: bool
) -> dict[str, int]:
    """Return the numbers of `asked` that are given, by role. Raises ServiceError if one is not allowed.

    `decided`: the scheduler chooses the numbers. `bounds`: each role's minimum and maximum number of workers.
    """
    if decided:
        raise ServiceError(WHO_DECIDES)
    numbers = {role: number for role, number in asked.items() if number is not None}
    for role, number in numbers.items():
        least, most = bounds[role]
        if number < (least or 0) or (most is not None and number > most):
            limit = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ServiceError(f"{role}={number} is not allowed: {role}_config allows {limit}")
    return numbers


def namespace(topic: str) -> str:
    """Return the namespace of a topic's actor. A cluster runs one deployment per topic."""
    return f"baton-{topic}"


class Desk:
    """The last published state, and the orders so far, merged. Runs as an actor."""

    def __init__(self) -> None:
        self._status: dict[str, Any] = {}
        self._orders = 0
        self._numbers: dict[str, int] = {}
        self._down = False

    def publish(self, status: dict[str, Any]) -> tuple[int, dict[str, int], bool]:
        """Store the latest state. Return the number and content of the last order, and whether to end."""
        self._status = status
        return self._orders, self._numbers, self._down

    def status(self) -> dict[str, Any]:
        """Return the last published state, {} before the first."""
        return self._status

    def scale(self, numbers: dict[str, int]) -> bool:
        self._orders += 1
        self._numbers = {**self._numbers, **numbers}
        return True

    def down(self) -> bool:
        self._down = True
        return True


class Remote:
    """A handle to a deployment that runs elsewhere on the cluster.

    with Remote.connect("auto", "baton") as deployment:
        deployment.scale(prefill=2)
    """

    def __init__(self, desk: Any, namespace: str) -> None:
        self._desk, self._namespace = desk, namespace

    @classmethod
    def connect(cls, address: str, topic: str) -> Self:
        """Connect to the deployment of `topic` on the cluster at `address`. Raises StartError."""
        cluster.connect(address)
        desk = cluster.named(NAME, namespace(topic))
        if desk is None:
            cluster.disconnect()
            raise StartError(f"no deployment of topic {topic!r} runs on this Ray cluster: baton ray up")
        return cls(desk, namespace(topic))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        cluster.disconnect()

    def status(self) -> dict[str, Any]:
        """Return the nodes and parts with their states. Raises ServiceError if there is no answer."""
        found: dict[str, Any] = self._call("status")
        return found

    def scale(
        self, *, prefill: int | None = None, decode: int | None = None, encode: int | None = None
    ) -> None:
        """Set the numbers of workers. Surplus workers are drained; new ones start where there is room.

        Returns at once; `status` shows the effect. Raises ServiceError if a number is outside the
        configuration's limits, or if the scheduler chooses the numbers.
        """
        status = self.status()
        decided = status["autoscale"] == "on"
        asked = {"prefill": prefill, "decode": decode, "encode": encode}
        self._call("scale", checked(asked, status["bounds"], decided=decided))

    def down(self) -> None:
        """Finish the running requests, end the deployment, and wait for its end. Raises ServiceError."""
        cluster.get([self._desk.down.remote()])
        deadline = time.monotonic() + END_S
        while cluster.named(NAME, self._namespace) is not None:
            if time.monotonic() > deadline:
                raise ServiceError(f"the deployment has not ended within {END_S:.0f} s")
            time.sleep(POLL_S)

    def _call(self, method: str, *arguments: Any) -> Any:
        (answer,) = cluster.get([getattr(self._desk, method).remote(*arguments)])
        if not answer:
            raise ServiceError("the deployment does not answer: it is starting or ending; try again")
        return answer
