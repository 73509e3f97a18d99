from baton.services.config import REVEAL, load
from baton.services.fleet.node import PartOrder
from baton.services.ray.cluster import Machine
from baton.services.ray.gangs import members_of
from baton.services.ray.nodes import place_routers

VISIBLE = "CUDA_VISIBLE_DEVICES"


def place(size, gpus="", cores=1, **engine):
    settings = load({"engine": {"data_parallel_size": size, **engine}, "worker": {"listen": "10.0.0.1:0"}})
    environment = {VISIBLE: gpus} if gpus else {}
    tree = settings.model_dump(mode="json", context=REVEAL)
    return PartOrder("decode-0", "decode", tree, environment, cores)


def test_a_plain_worker_is_its_place():
    one = place(1, "0,1")
    assert members_of(one) == [one]


def test_members_share_the_gpus_and_cores():
    found = members_of(place(2, "4,5,6,7", 5))
    seats = [(one.name, one.tree.worker.gang_name, one.tree.worker.gang_rank) for one in found]
    assert seats == [("decode-0.r0", "decode-0", 0), ("decode-0.r1", "decode-0", 1)]
    assert [one.environment for one in found] == [{VISIBLE: "4,5"}, {VISIBLE: "6,7"}]
    assert {(one.cores, one.role, one.tree.worker.listen) for one in found} == {(2, "decode", "10.0.0.1:0")}


def test_without_gpus_each_has_a_core():
    found = members_of(place(3))
    assert [(one.environment, one.cores) for one in found] == [({}, 1)] * 3


def test_each_node_has_its_members():
    four = place(4, "0,1", nodes=2)
    assert [one.name for one in members_of(four, 0)] == ["decode-0.r0", "decode-0.r1"]
    seats = [(one.tree.worker.gang_rank, one.environment) for one in members_of(four, 1)]
    assert seats == [(2, {VISIBLE: "0"}), (3, {VISIBLE: "1"})]
    (limb,) = members_of(place(1, "0,1", tensor_parallel_size=4, nodes=2), 1)
    assert (limb.name, limb.tree.worker.gang_rank, limb.environment) == ("decode-0.r1", 1, {VISIBLE: "0,1"})


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
