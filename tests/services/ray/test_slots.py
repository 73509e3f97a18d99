"""The workers of a deployment on Ray: which start, which leave, and which roles they adopt.

Placement groups are faked, because a cluster would take longer than all other tests here; e2e tests have one.
"""

from types import SimpleNamespace

import pytest

from baton.services.ray import cluster
from baton.services.ray.cluster import Machine, Place
from baton.services.ray.config import read
from baton.services.ray.slots import Slots
from harness.deployment import MODEL

HERE = {"n": Machine("n", "here", "127.0.0.1")}
BOTH = HERE | {"m": Machine("m", "there", "10.0.0.2")}


class Groups:
    def __init__(self):
        self.there = []
        self.bundles = {}

    def reserve(self, name, bundles, _labels):
        assert all(bundles)
        self.bundles[name] = len(bundles)
        self.there.append(name)
        return SimpleNamespace(name=name, id=SimpleNamespace(hex=lambda: name))

    def give_up(self, group):
        self.there.remove(group.name)


@pytest.fixture
def groups(monkeypatch):
    one = Groups()
    monkeypatch.setattr(cluster, "reserve", one.reserve)
    monkeypatch.setattr(cluster, "give_up", one.give_up)
    return one


@pytest.fixture
def slots(groups):
    return made({"engine": {"model": str(MODEL)}})


def made(tree):
    return Slots(read(tree), "t", lambda _name, _text: None)


def roles(slots):
    return {slot.name: slot.role for slot in slots if not slot.leaving}


def by_number(slots, **wanted):
    slots.match(slots.by_number(wanted))
    return roles(slots)


def test_numbers_keep_the_eldest(slots, groups):
    pair = {"prefill-0": "prefill", "decode-0": "decode"}
    assert by_number(slots, prefill=1, decode=2) == pair | {"decode-1": "decode"}
    assert by_number(slots, prefill=1, decode=1) == pair
    # A worker that leaves keeps its name and its placement group until it has left.
    assert "decode-2" in by_number(slots, prefill=1, decode=2)
    slots.let_go({"decode-1"})
    assert "t-decode-1" in groups.there
    slots.let_go(set())
    assert groups.there == ["t-prefill-0", "t-decode-0", "t-decode-2"]


def test_a_worker_that_is_wanted_again_comes_after_it_has_left(slots, groups):
    both = {"prefill-0": "prefill", "worker-1": "decode"}
    slots.match(both)
    slots.match({"prefill-0": "prefill"})
    slots.match(both)
    assert roles(slots) == {"prefill-0": "prefill"}
    slots.let_go(set())
    slots.match(both)
    assert roles(slots) == both
    assert len(groups.there) == 2


def test_roles_are_followed_and_the_side_stays(slots):
    pair = {"prefill-0": "prefill", "decode-0": "decode"}
    slots.match(pair | {"decode-1": "decode"})
    ((slot, former),) = slots.follow({"decode-1": "prefill", "prefill-0": "mixed", "unknown": "decode"})
    assert (slot.name, slot.role, slot.side, former) == ("decode-1", "prefill", "decode", "decode")
    assert roles(slots)["prefill-0"] == "prefill"
    assert slots.follow({"decode-1": "prefill"}) == []
    # The numbers followed the change of role, so no worker leaves.
    assert by_number(slots, prefill=2, decode=1) == pair | {"decode-1": "prefill"}


def test_it_starts_where_it_has_room_and_waits_when_its_node_died(slots):
    slots.match({"decode-0": "decode"})
    (slot,) = slots
    slots.locate({}, HERE)
    assert (slot.starts, slot.waits) == (False, "waits for room: 1 CPU")
    slots.locate({"t-decode-0": Place("CREATED", ("n",))}, HERE)
    assert (slot.starts, slot.host) == (True, "here")
    slots.locate({"t-decode-0": Place("CREATED", ("n",))}, {})
    assert (slot.starts, slot.waits) == (False, "lost with here; waits for room: 1 CPU")
    assert slots.back("decode-0", {"decode-0"}) == ""
    slots.locate({"t-decode-0": Place("CREATED", ("n",))}, HERE)
    assert "; back on here 0." in slots.back("decode-0", {"decode-0"})
    assert slots.back("decode-0", {"decode-0"}) == ""


def test_a_gang_is_one_slot_with_one_reservation(groups):
    gang = {"engine_kwargs": {"data_parallel_size": 2, "enable_expert_parallel": True}}
    slots = made({"engine": {"model": str(MODEL)}, "decode_config": gang})
    both = ["decode-0.r0", "decode-0.r1"]
    by_number(slots, prefill=1, decode=1)
    assert groups.there == ["t-prefill-0", "t-decode-0"]
    prefill, decode = slots
    assert (prefill.members, decode.members) == (["prefill-0"], both)
    assert decode.waits == "waits for room: 2 CPU"
    assert [slot.name for slot, _ in slots.follow(dict.fromkeys(both, "prefill"))] == ["decode-0"]
    # It is back once both are ready, and has left once both have ended.
    slots.locate({"t-decode-0": Place("CREATED", ("n",))}, HERE)
    slots.locate({"t-decode-0": Place("CREATED", ("n",))}, {})
    slots.locate({"t-decode-0": Place("CREATED", ("n",))}, HERE)
    assert slots.back(both[0], {both[0]}) == ""
    assert "; back on here" in slots.back(both[1], both)
    slots.match({"prefill-0": "prefill"})
    slots.let_go({both[1]})
    assert "t-decode-0" in groups.there
    slots.let_go(set())
    assert groups.there == ["t-prefill-0"]


def test_a_gang_over_two_nodes_has_a_bundle_on_each(groups):
    """Two engines of two ranks, one on each node, or one engine of which the second node has a limb."""
    wide = {"engine_kwargs": {"data_parallel_size": 2, "tensor_parallel_size": 2, "nnodes": 2}}
    long = {"engine_kwargs": {"tensor_parallel_size": 4, "nodes": 2}}
    given = {"engine": {"model": str(MODEL)}, "security": {"plain_ranks": True}}
    slots = made(given | {"prefill_config": long, "decode_config": wide})
    by_number(slots, prefill=1, decode=1)
    assert groups.bundles == {"t-prefill-0": 2, "t-decode-0": 2}
    prefill, decode = slots
    assert decode.waits == "waits for room: 2 CPU on each of 2 nodes"
    slots.locate({"t-prefill-0": Place("CREATED", ("n", "m"))}, BOTH)
    assert (prefill.host, decode.host, prefill.starts) == ("here, there", "", True)
    assert prefill.seats == [("prefill-0.r0", "prefill-0.r0", "n"), ("prefill-0.r1", "prefill-0.r0", "m")]
    assert decode.seats == [("decode-0.r0", "decode-0.r0", ""), ("decode-0.r1", "decode-0.r1", "")]
    # It is lost with either node, and back once its worker is.
    slots.locate({"t-prefill-0": Place("CREATED", ("n", "m"))}, HERE)
    assert not prefill.starts
    assert prefill.waits.startswith("lost with here, there; waits")
    slots.locate({"t-prefill-0": Place("CREATED", ("m", "n"))}, BOTH)
    assert slots.back("prefill-0.r0", {"prefill-0.r0"}).startswith("; back on there, here")


def test_devices_are_asked_for_again_if_a_node_failed_to_say_them(groups, monkeypatch):
    gpu = {"placement_group_config": {"bundles": [{"GPU": 1}]}}
    model = {"engine": {"model": str(MODEL)}, "prefill_config": gpu, "decode_config": gpu}
    slots = made(model)
    slots.match({"prefill-0": "prefill"})
    asked = []
    answers = [([None], False), ([None], True), ([{"CUDA": "0"}], True)]
    monkeypatch.setattr(cluster, "visible", lambda _group, _bundle, number: asked.append(number))
    monkeypatch.setattr(cluster, "get", lambda _references, _timeout_s: answers[0][0])
    monkeypatch.setattr(cluster, "ended", lambda _references: answers.pop(0)[1])
    for asks in (1, 1, 1, 2, 2):
        slots.locate({"t-prefill-0": Place("CREATED", ("n",))}, HERE)
        assert len(asked) == asks
    (slot,) = slots
    assert slot.environments == [{"CUDA": "0"}]
