"""Names of new workers, and the nodes of routers."""

from __future__ import annotations

import pytest

from baton.services.ray.cluster import Machine
from baton.services.ray.placing import new_names, place_routers

MACHINES = {name: Machine(name, f"host-{name}", f"10.0.0.{number}") for number, name in enumerate("abc")}


@pytest.mark.parametrize(
    ("taken", "number", "names"),
    [
        ([], 2, ["decode-0", "decode-1"]),
        (["decode-0", "decode-2"], 2, ["decode-1", "decode-3"]),
        (["prefill-0"], 1, ["decode-0"]),
        (["decode-0"], 0, []),
    ],
)
def test_new_names_fill_the_gaps(taken: list[str], number: int, names: list[str]) -> None:
    assert new_names("decode", taken, number) == names


def test_the_first_router_is_at_home_and_no_node_has_two() -> None:
    assert place_routers({}, MACHINES, "b", 1) == {"router-0": "b"}
    assert place_routers({}, MACHINES, "b", 5) == {"router-0": "b", "router-1": "a", "router-2": "c"}


def test_a_router_stays_until_its_node_dies() -> None:
    there = {"router-0": "c", "router-1": "a"}
    assert place_routers(there, MACHINES, "b", 2) == there
    left = {name: MACHINES[name] for name in "bc"}
    assert place_routers(there, left, "b", 2) == {"router-0": "c", "router-1": "b"}
    assert place_routers(there, {"c": MACHINES["c"]}, "b", 2) == {"router-0": "c"}
