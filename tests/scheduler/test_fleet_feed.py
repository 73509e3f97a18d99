"""Routers get changes of the fleet, with the same result as a full snapshot."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protos import scheduler_pb2 as pb
from baton.scheduler import fleet_feed
from baton.scheduler.fleet_feed import FleetFeed
from baton.scheduler.standby import FleetCopy
from baton.scheduler.types import FleetView, Reserved, WorkerRecord, booked_to_wire
from harness.scheduling import Clock, identity

LEASE_S = 5.0
NOW = Clock().now


def record(name, **changes):
    one = WorkerRecord(identity(name), pb.WORKER_STATE_READY, None, Reserved(), False, NOW)
    for key, value in changes.items():
        setattr(one, key, value)
    return one


def view(workers):
    return FleetView(dict(workers))


def reply(feed, copy, mine=None):
    yours = [booked_to_wire(key, one) for key, one in (mine or {}).items()]
    return pb.SnapshotReply(fleet=feed.since(copy.feed, copy.revision), yours=yours)


def shown(copy):
    return {key: one.SerializeToString(deterministic=True) for key, one in copy.workers.items()}


def change(draw, workers):
    name = draw.choice("abcdef")
    what = draw.randrange(6)
    if what == 0:
        workers.pop(name, None)
    elif what == 1 or name not in workers:
        workers[name] = record(name, identity=identity(name, block_size=draw.choice([16, 32])))
    elif what == 2:
        workers[name].load = pb.WorkerLoad(running=draw.randrange(3))
    elif what == 3:
        workers[name].reserved = Reserved(draw.randrange(3), draw.randrange(3), draw.randrange(3), 0)
    elif what == 4:
        workers[name].heard_at = NOW - draw.choice([0.0, 1.0, LEASE_S - 0.5])
    else:
        workers[name].drain_asked = not workers[name].drain_asked


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 32))
def test_changes_give_the_same_copy_as_a_full_snapshot(seed):
    """This also holds if replies are lost, routers skip revisions, or another scheduler answers."""
    draw = random.Random(seed)
    feed, workers = FleetFeed(LEASE_S, Clock()), {"a": record("a")}
    copies = [FleetCopy() for _ in range(3)]
    processes = [pb.Process(id="r", kind="router")]
    for _ in range(40):
        for _ in range(draw.randrange(4)):
            change(draw, workers)
        if draw.random() < 0.1:
            processes = [pb.Process(id=f"r{draw.randrange(3)}", kind="router")]
        if draw.random() < 0.05:
            feed = FleetFeed(LEASE_S, Clock())
        feed.refresh(view(workers), processes)
        mine = {name: Reserved(1, 1, 0, 0) for name in workers if draw.random() < 0.3}
        for copy in copies:
            if draw.random() < 0.4:
                continue
            answer = reply(feed, copy, mine)
            if draw.random() < 0.2:
                continue  # the reply is lost
            before = set(copy.workers)
            missing = copy.learn(answer)
            assert {one.identity.worker_id for one in missing} == before - workers.keys()
            whole = FleetCopy()
            whole.learn(reply(feed, whole, mine))
            assert shown(copy) == shown(whole)
            assert copy.processes == processes
            assert set(copy.workers) == set(workers)


def test_only_changes_are_sent_and_serialized_once():
    feed, workers = FleetFeed(LEASE_S, Clock()), {f"w{number}": record(f"w{number}") for number in range(50)}
    first, second = FleetCopy(), FleetCopy()
    feed.refresh(view(workers), [])
    whole = reply(feed, first)
    first.learn(whole)
    second.learn(whole)
    for one in workers.values():
        one.heard_at = NOW - 1.0  # a heartbeat is not a change
    workers["w7"].load = pb.WorkerLoad(running=3)
    feed.refresh(view(workers), [])
    update = feed.since(first.feed, first.revision)
    assert update is feed.since(second.feed, second.revision)
    assert len(update) < len(whole.fleet) / 30
    told = pb.FleetUpdate.FromString(update)
    assert [one.identity for one in told.workers] == [pb.WorkerIdentity(worker_id="w7")]
    first.learn(reply(feed, first))
    assert first.workers["w7"].load.running == 3
    assert first.workers["w7"].identity == workers["w7"].identity


def test_the_age_of_a_silent_workers_heartbeat_is_sent():
    feed, copy, workers = FleetFeed(LEASE_S, Clock()), FleetCopy(), {"a": record("a"), "b": record("b")}
    for age_s, told_s in (
        (0.4, 0.0),
        (LEASE_S / 2 - 0.1, 0.0),
        (LEASE_S / 2 + 0.1, LEASE_S / 2 + 0.1),
        (LEASE_S - 0.1, LEASE_S - 0.1),
        (0.2, 0.0),
    ):
        workers["a"].heard_at = NOW - age_s
        feed.refresh(view(workers), [])
        copy.learn(reply(feed, copy))
        assert copy.workers["a"].heartbeat_age_s == pytest.approx(told_s)
        assert copy.workers["b"].heartbeat_age_s == 0.0


def test_a_router_with_an_old_revision_gets_everything(monkeypatch):
    monkeypatch.setattr(fleet_feed, "GONE_KEPT", 3)
    feed, copy = FleetFeed(LEASE_S, Clock()), FleetCopy()
    workers = {f"w{number}": record(f"w{number}") for number in range(8)}
    feed.refresh(view(workers), [])
    copy.learn(reply(feed, copy))
    for number in range(5):
        del workers[f"w{number}"]
        feed.refresh(view(workers), [])
    assert pb.FleetUpdate.FromString(feed.since(copy.feed, copy.revision)).whole
    copy.learn(reply(feed, copy))
    assert set(copy.workers) == set(workers)
