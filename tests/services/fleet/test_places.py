"""A fleet obeys orders: workers start in its places and drain, whatever earlier orders did.

Workers are real processes that wait for a signal; `ran` has the roles with which they started.
"""

import signal
import sys
from multiprocessing import Pipe

import pytest

from baton.services.config import Settings, load
from baton.services.fleet.parts import Parts, Patience
from baton.services.fleet.places import Plan, members_of, places_of
from baton.services.fleet.watch import Ordered
from harness.support import CALL_S
from tests.services.fleet import test_parts

SETTINGS = Settings(autoscale={"mode": "on", "prefill": "1-2", "decode": "1-2"})


class Fleet(test_parts.Fleet):
    """1P1D and two more places."""

    def __init__(self, folder):
        super().__init__(folder, Patience(restarts=1, window_s=60.0, backoff_s=0.01))
        self.started, self._tell = Pipe(duplex=False)
        self.places = self.of(SETTINGS)[0]
        self.places.start(self.parts)

    def of(self, *settings):
        plans = [Plan(one, ["prefill", "decode"], f"m{i}-" if i else "") for i, one in enumerate(settings)]
        return places_of(plans, lambda _: self.worker)

    def worker(self, name, role, _where):
        def begun():
            self._tell.send((name, role()))
            if name == "worker-3":
                sys.exit(1)

        return lambda: test_parts.wait_for(signal.SIGTERM, begun)

    def obey(self, fence, **roles):
        self.places.obey(
            Ordered("", fence, {key.replace("_", "-"): role for key, role in roles.items()}), self.parts
        )

    def ran(self):
        assert self.started.poll(CALL_S)
        return self.started.recv()

    def part(self, name):
        return next(one for one in self.parts.members if one.name == name)

    @property
    def names(self):
        return [one.name for one in self.parts.members]


@pytest.fixture
def fleet(tmp_path):
    one = Fleet(tmp_path)
    assert {one.ran(), one.ran()} == {("prefill-0", "prefill"), ("decode-0", "decode")}
    yield one
    one.parts.stop(0.0)


def test_encode_workers_get_no_orders(fleet):
    plan = Plan(SETTINGS, ["prefill", "decode", "encode"], "m1-")
    (places,) = places_of([plan], lambda _: fleet.worker)
    assert places.names == ["m1-prefill-0", "m1-decode-0", "m1-encode-0", "m1-worker-3", "m1-worker-4"]
    assert list(places.owners) == [name for name in places.names if name != "m1-encode-0"]
    places.start(fleet.parts)
    assert ("m1-encode-0", "encode") in {fleet.ran() for _ in range(3)}
    places.obey(Ordered("m1-", 1, {"m1-prefill-0": "prefill", "m1-encode-0": "decode"}), fleet.parts)
    assert fleet.said == ["m1-decode-0: no longer ordered: draining"]


def test_encode_workers_that_are_scaled_have_places_of_their_own(fleet):
    settings = SETTINGS.model_copy(deep=True)
    settings.autoscale.encode = "0-2"
    (places,) = places_of([Plan(settings, ["prefill", "decode", "encode"], "m1-")], lambda _: fleet.worker)
    assert places.names[2:] == ["m1-encode-0", "m1-encode-1", "m1-worker-4", "m1-worker-5"]
    assert list(places.owners.values()) == ["", "", "encode", "encode", "", ""]
    places.start(fleet.parts)
    assert ("m1-encode-0", "encode") in {fleet.ran() for _ in range(3)}
    both = {"m1-prefill-0": "prefill", "m1-decode-0": "decode"}
    places.obey(Ordered("m1-", 1, both | {"m1-encode-1": "encode"}), fleet.parts)
    assert fleet.ran() == ("m1-encode-1", "encode")
    places.obey(Ordered("m1-", 2, both), fleet.parts)
    assert [one.name for one in fleet.parts.members if one.leaves_by is None][2:] == [*both]


def test_an_encode_worker_has_one_rank():
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    settings = load({"engine": {"tensor_parallel_size": 2, "speculative_config": drafts}})
    plan = Plan(settings, ["mixed", "encode"])
    mixed, encode = (plan.settings_of(role).engine for role in plan.roles)
    assert (mixed.ranks, encode.ranks, encode.speculative_config) == (2, 1, None)


def test_orders_for_one_model_leave_the_workers_of_another_alone(fleet):
    fixed, other = fleet.of(Settings(), SETTINGS)
    assert (fixed.names, other.names[2:]) == (["prefill-0", "decode-0"], ["m1-worker-2", "m1-worker-3"])
    other.start(fleet.parts)
    assert {fleet.ran(), fleet.ran()} == {("m1-prefill-0", "prefill"), ("m1-decode-0", "decode")}
    fleet.obey(5, prefill_0="prefill", decode_0="decode")
    assert not fleet.said
    assert fleet.names == ["prefill-0", "decode-0", "m1-prefill-0", "m1-decode-0"]


def test_what_is_missing_starts_once(fleet):
    for _ in range(3):
        fleet.obey(5, prefill_0="prefill", decode_0="decode", worker_2="decode", elsewhere="decode")
    assert fleet.ran() == ("worker-2", "decode")
    assert fleet.names == ["prefill-0", "decode-0", "worker-2"]
    assert not fleet.started.poll(0)
    assert fleet.said == ["worker-2: ordered: decode worker"]


def test_what_is_too_many_drains_and_is_not_started_again(fleet):
    for _ in range(2):
        fleet.obey(5, prefill_0="prefill")
    assert fleet.parts.waiting_for == ["prefill-0"]
    fleet.until(lambda: fleet.names == ["prefill-0"], "the decode worker has ended")
    assert fleet.said == ["decode-0: no longer ordered: draining", "decode-0: ended"]
    fleet.obey(5, prefill_0="prefill", decode_0="decode")
    assert fleet.ran() == ("decode-0", "decode")


def test_one_that_does_not_drain_in_time_is_killed(fleet):
    part = fleet.part("decode-0")
    part.child.process.join(0)
    fleet.obey(5, prefill_0="prefill")
    part.leaves_by = 0.0
    fleet.until(lambda: "decode-0" not in fleet.names, "it is gone")


def test_orders_of_an_earlier_decider_are_ignored(fleet):
    fleet.obey(5, prefill_0="prefill", decode_0="decode")
    fleet.obey(4, prefill_0="prefill")
    assert not any(one.leaves_by is not None for one in fleet.parts.members)


def test_a_worker_that_dies_starts_with_the_role_it_had_last(fleet):
    fleet.obey(5, prefill_0="decode", decode_0="decode")  # its role has changed
    part = fleet.part("prefill-0")
    part.proven = True
    part.child.process.kill()
    fleet.until(lambda: bool(part.budget.deaths) and part.runs, "it is started again")
    assert fleet.ran() == ("prefill-0", "decode")


def test_an_ordered_worker_that_cannot_start_does_not_end_the_others(fleet):
    fleet.obey(5, prefill_0="prefill", decode_0="decode", worker_3="decode")
    fleet.until(lambda: fleet.part("worker-3").given_up, "it is given up")
    assert "given up" in fleet.said[-1]
    fleet.obey(5, prefill_0="prefill", decode_0="decode")
    fleet.until(lambda: "worker-3" not in fleet.names, "its place is free again")


def test_places_of_sides_that_differ_belong_to_one(fleet):
    engines = {"decode": {"data_parallel_size": 2}}
    bounds = {"mode": "on", "prefill": "1-3", "decode": "1-2"}
    (one,) = fleet.of(Settings(autoscale=bounds, fleet={"engines": engines}))
    assert one.owners == {
        "prefill-0": "prefill",
        "decode-0": "decode",
        "prefill-1": "prefill",
        "decode-1": "decode",
        "prefill-2": "prefill",
    }
    assert list(one._runs["decode-1"]) == ["decode-1.r0", "decode-1.r1"]
    assert list(one._runs["prefill-2"]) == ["prefill-2"]
    assert set(fleet.places.owners.values()) == {""}


def test_a_place_has_all_workers_of_a_gang(tmp_path):
    settings = Settings(fleet={"engines": {"decode": {"data_parallel_size": 2}}})
    seen = {}
    where = {}

    def make(own):
        def worker(name, _role, devices):
            seen[name], where[name] = own, devices
            return signal.pause

        return worker

    (places,) = places_of([Plan(settings, ["prefill", "decode", "decode"])], make)
    assert places.names == ["prefill-0", "decode-0", "decode-1"]
    members = {name: (one.worker.gang_name, one.worker.gang_rank) for name, one in seen.items()}
    assert members == {
        "prefill-0": ("", 0),
        "decode-0.r0": ("decode-0", 0),
        "decode-0.r1": ("decode-0", 1),
        "decode-1.r0": ("decode-1", 0),
        "decode-1.r1": ("decode-1", 1),
    }
    assert all(one.cpu for one in where.values())
    parts = Parts(tmp_path, lambda *_: None)
    places.start(parts)
    gangs = {name: gang for name, (gang, _) in members.items()}
    assert {one.name: one.gang for one in parts.members} == gangs
    places.obey(Ordered("", 1, {"prefill-0": "prefill", "decode-1": "decode"}), parts)
    leaving = [one.name for one in parts.members if one.leaves_by is not None]
    assert leaving == ["decode-0.r0", "decode-0.r1"]
    parts.stop(0.0)


@pytest.mark.parametrize(
    ("engine", "first", "second"),
    [
        ({}, ["p"], ["p"]),
        ({"data_parallel_size": 2}, ["p.r0", "p.r1"], ["p.r0", "p.r1"]),  # a gang on each machine
        ({"nodes": 2, "tensor_parallel_size": 2}, ["p.r0"], ["p.r1"]),
        ({"nodes": 2, "data_parallel_size": 4}, ["p.r0", "p.r1"], ["p.r2", "p.r3"]),
    ],
)
def test_each_machine_has_its_members(engine, first, second):
    for node_rank, expected in enumerate((first, second)):
        settings = load({"engine": engine, "fleet": {"node_rank": node_rank}, "worker": {"gang": "given"}})
        found = members_of("p", settings)
        assert list(found) == expected
        gangs = {(one.worker.gang_name, f"p.r{one.worker.gang_rank}") for one in found.values()}
        assert gangs == ({("", "p.r0")} if expected == ["p"] else {("p", name) for name in expected})
