from baton.services.ray.cluster import Machine
from baton.services.ray.nodes import place_routers

MACHINES = {name: Machine(name, f"host-{name}", f"10.0.0.{number}") for number, name in enumerate("abc")}


def test_the_first_router_is_at_home_and_no_node_has_two():
    assert place_routers({}, MACHINES, "b", 1) == {"router-0": "b"}
    assert place_routers({}, MACHINES, "b", 5) == {"router-0": "b", "router-1": "a", "router-2": "c"}


def test_a_router_stays_until_its_node_dies():
    there = {"router-0": "c", "router-1": "a"}
    assert place_routers(there, MACHINES, "b", 2) == there
    left = {name: MACHINES[name] for name in "bc"}
    assert place_routers(there, left, "b", 2) == {"router-0": "c", "router-1": "b"}
    assert place_routers(there, {"c": MACHINES["c"]}, "b", 2) == {"router-0": "c"}
