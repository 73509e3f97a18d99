"""Placing from a snapshot."""

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment
from baton.scheduler.policy import NoChoice
from baton.scheduler.roster import HELD_UP_S, Settling
from baton.scheduler.standby import KEPT_S, Standby
from baton.services.config import PolicySettings
from harness.scheduling import held, identity, need

LEASE_S = 15.0


def snapshot(*names, settling=False, requests=0, left=(), age_s=0.0):
    """Return a snapshot of workers by name (p...: prefill, d...: decode, else mixed).

    Other routers have `requests` on each. The last worker's heartbeat is `age_s` old.
    """
    roles = {"p": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE}
    workers = [
        pb.WorkerStatus(
            identity=identity(name, roles.get(name[0], pb.ROLE_MIXED)),
            state=pb.WORKER_STATE_READY,
            reserved_requests=requests,
        )
        for name in names
    ]
    if workers:
        workers[-1].heartbeat_age_s = age_s
    return pb.SnapshotReply(
        fleet=pb.FleetUpdate(whole=True, workers=workers).SerializeToString(),
        settling=settling,
        placement_lease_s=LEASE_S,
        max_queued_prompt_tokens=1_000,
        max_queue_factor=2.0,
        left=left,
    )


@pytest.fixture
def standby(clock):
    return Standby(PolicySettings(), clock)


def fill(standby, mine):
    """Place until all is full; return how many were placed."""
    for number in range(100):
        picked = standby.place(need(f"r{len(mine)}.{number}", prompt=1, new=1), held(mine))
        if not isinstance(picked, Assignment):
            assert isinstance(picked, NoChoice)
            assert picked.code == pb.Rejection.CODE_FULL
            return number
        mine.append(picked.booking)
    raise AssertionError("it never gets full")


def test_heard_workers_have_recent_heartbeats(standby, clock):
    standby.learn(snapshot("p", "d", age_s=4.0))
    clock.now += 3.0
    assert {one.identity.worker_id for one in standby.heard(8.0)} == {"p", "d"}
    assert {one.identity.worker_id for one in standby.heard(5.0)} == {"p"}
    clock.now += 6.0
    assert standby.heard(8.0) == []


def test_a_pair_is_chosen_as_the_scheduler_would(standby):
    standby.learn(snapshot("p", "d"))
    picked = standby.place(need(prompt=100, new=10), {})
    assert isinstance(picked, Assignment)
    assert (picked.prefill.worker_id, picked.decode.worker_id) == ("p", "d")
    assert (picked.booking.prompt_tokens, picked.booking.blocks) == (100, 8)


def test_bookings_of_others_count_until_their_leases_end(standby, clock):
    """8 requests fit. This router's own bookings count until they end."""
    standby.learn(snapshot("m", requests=3))
    mine = []
    assert fill(standby, mine) == 5
    clock.now += LEASE_S - 1
    assert fill(standby, mine) == 0
    del mine[:2]
    assert fill(standby, mine) == 2
    clock.now += 2
    assert fill(standby, mine) == 3
    clock.now += 10 * LEASE_S
    assert fill(standby, mine) == 0


def test_nothing_is_placed_without_a_recent_snapshot(standby, clock):
    for _ in range(2):
        assert standby.place(need(), {}) is None
        assert standby.workers == []
        standby.learn(snapshot("m"))
        clock.now += KEPT_S
        assert isinstance(standby.place(need(), {}), Assignment)
        clock.now += 1


def test_an_excluded_worker_is_avoided(standby):
    standby.learn(snapshot("a", "b"))
    for number in range(8):
        picked = standby.place(need(f"r{number}", 1, 100, 10, "a"), {})
        assert isinstance(picked, Assignment)
        assert picked.decode.worker_id == "b"


def test_workers_stay_while_a_scheduler_settles(standby):
    standby.learn(snapshot("a", "b", "c"))
    standby.learn(snapshot("d", settling=True, left=("b",)))
    assert {one.identity.worker_id for one in standby.workers} == {"a", "c", "d"}
    standby.learn(snapshot("d"))
    assert {one.identity.worker_id for one in standby.workers} == {"d"}


def test_a_worker_that_only_the_scheduler_has_lost_stays(standby):
    standby.learn(snapshot("a", "b", "c"))
    assert not standby.keeps_lost
    standby.learn(snapshot("c", left=("b",)), reached={"a", "b", "c"})
    assert standby.keeps_lost
    assert {one.identity.worker_id for one in standby.workers} == {"a", "c"}
    standby.learn(snapshot("a", "c"), reached={"a"})
    assert not standby.keeps_lost
    standby.learn(snapshot("c"))
    assert {one.identity.worker_id for one in standby.workers} == {"c"}


def test_a_scheduler_settles_after_its_start_and_after_a_pause(clock):
    settling = Settling(5.0, clock)
    for _ in range(4):
        assert settling
        clock.now += 1.0
    clock.now += 1.0
    assert not settling
    clock.now += HELD_UP_S + 0.1
    assert settling  # heartbeats may still be unread
    for _ in range(5):
        clock.now += 1.0
        settling.tick()
    assert not settling
