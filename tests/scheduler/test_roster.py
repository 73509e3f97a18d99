"""The workers that a scheduler knows."""

import pytest

from baton.attempts import EPOCH_KEEP_S, Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import StaleWorker
from baton.scheduler.roster import PEERS_AGE_S, Peers
from baton.scheduler.types import FleetView, Heard, Reserved, WorkerRecord
from harness.scheduling import book, identity, need, register, report
from tests.scheduler.conftest import BOOKING_LEASE_S, WORKER_LEASE_S

READY, STARTING, DRAINING = pb.WORKER_STATE_READY, pb.WORKER_STATE_STARTING, pb.WORKER_STATE_DRAINING
STALE, UNKNOWN = Heard(known=False, drain=False, stale=True), Heard(known=False, drain=False)


def of_epoch(epoch, worker_id="w", *, model="tiny", name=""):
    one = identity(worker_id)
    one.epoch, one.model, one.name = epoch, model, name
    return one


def beat(roster, worker_id="w", epoch=0):
    return roster.heartbeat(worker_id, READY, pb.WorkerLoad(), epoch)


def test_registration_and_heartbeat(roster, clock):
    register(roster, "p", pb.ROLE_PREFILL)
    worker = roster.view().workers["p"]
    assert (worker.identity, worker.load) == (identity("p", pb.ROLE_PREFILL), None)
    assert (worker.placeable, worker.reserved, worker.heard_at) == (True, Reserved(), clock.now)
    clock.now += 1
    load = pb.WorkerLoad(running=3, counts=pb.EngineCounts(prefix_queries=2**40))
    assert roster.heartbeat("p", DRAINING, load) == Heard(known=True, drain=False)
    worker = roster.view().workers["p"]
    assert (worker.load, worker.placeable, worker.heard_at) == (load, False, clock.now)


def test_registering_again_replaces_the_identity_and_keeps_the_load(roster):
    bare = identity("w", pb.ROLE_PREFILL)
    bare.ClearField("capacity")
    assert roster.register(bare, STARTING) == ""
    assert not roster.view().workers["w"].placeable
    roster.heartbeat("w", READY, pb.WorkerLoad(running=2))
    assert not roster.view().workers["w"].placeable  # its capacity is unknown
    register(roster, "w", pb.ROLE_DECODE)
    view = roster.view()
    assert view.workers["w"].placeable
    assert view.workers["w"].load == pb.WorkerLoad(running=2)
    assert (len(view.of(pb.ROLE_DECODE)), view.of(pb.ROLE_PREFILL)) == (1, [])


def test_a_view_is_replaced_only_when_workers_come_or_go(roster, clock):
    register(roster, "a")
    first = roster.view()
    beat(roster, "a")
    roster.drain(["a"])
    assert roster.view() is first
    assert first.workers["a"].drain_asked  # updated in place
    register(roster, "b")
    second = roster.view()
    roster.deregister("a")
    third = roster.view()
    clock.now += WORKER_LEASE_S
    seen = [set(one.workers) for one in (first, second, third, roster.view())]
    assert seen == [{"a"}, {"a", "b"}, {"b"}, set()]


def test_another_model_is_refused(roster):
    register(roster, "first")
    refusal = roster.register(of_epoch(0, "other", model="large"), READY)
    assert refusal == "model 'large' here, 'tiny' in topic 'topic' (worker first): serve one model a topic"
    register(roster, "weights", fingerprint="f2")  # other weights and another vLLM are accepted
    register(roster, "vllm", vllm="0.33.0")
    assert set(roster.view().workers) == {"first", "weights", "vllm"}


def test_another_model_is_accepted_when_no_worker_serves_the_first(roster, clock):
    register(roster, "a")
    assert roster.register(of_epoch(0, "a", model="second"), READY) == ""  # the only worker
    roster.deregister("a")
    assert roster.register(of_epoch(0, "b", model="third"), READY) == ""
    assert "'second' here, 'third'" in roster.register(of_epoch(0, "c", model="second"), READY)
    clock.now += WORKER_LEASE_S
    assert roster.register(of_epoch(0, "c", model="second"), READY) == ""


def test_leases_expire_without_heartbeats(roster, clock):
    for name in ("silent", "heard"):
        register(roster, name)
    clock.now += WORKER_LEASE_S - 0.001
    assert beat(roster, "heard").known
    assert set(roster.view().workers) == {"silent", "heard"}
    clock.now += 0.001
    assert set(roster.view().workers) == {"heard"}
    assert beat(roster, "silent") == UNKNOWN
    assert roster.left() == ()  # it did not deregister
    clock.now += WORKER_LEASE_S
    assert not roster.view().workers


def test_late_messages_change_nothing(roster, clock):
    assert roster.register(of_epoch(2), READY) == ""
    with pytest.raises(StaleWorker) as caught:
        roster.register(of_epoch(1), STARTING)
    assert caught.value.last == 2
    clock.now += 1
    assert beat(roster, epoch=1) == STALE
    assert not roster.deregister("w", 1)
    worker = roster.view().workers["w"]
    assert (worker.placeable, worker.heard_at) == (True, clock.now - 1)
    assert roster.heartbeat("w", DRAINING, pb.WorkerLoad(), 3).known
    assert beat(roster, epoch=2) == STALE
    assert not roster.view().workers["w"].placeable


@pytest.mark.parametrize("goodbye", [True, False])
def test_the_epoch_of_a_gone_worker_is_remembered(roster, clock, *, goodbye):
    roster.register(of_epoch(2), READY)
    if goodbye:
        assert roster.deregister("w", 4)
    else:
        beat(roster, epoch=4)
        clock.now += WORKER_LEASE_S
        assert not roster.view().workers
    clock.now += EPOCH_KEEP_S - 0.001
    for late in (1, 3):
        with pytest.raises(StaleWorker):
            roster.register(of_epoch(late), READY)
        assert beat(roster, epoch=late) == STALE
        assert not roster.deregister("w", late)
    assert roster.left() == (("w",) if goodbye else ())
    clock.now += 0.001
    assert roster.register(of_epoch(1), READY) == ""
    assert roster.left() == ()


@pytest.mark.parametrize("heard", [True, False])
def test_an_unknown_worker_can_deregister(roster, clock, *, heard):
    """Its heartbeats were lost, or the scheduler was restarted. Routers may still use the worker."""
    if heard:
        roster.register(of_epoch(1), READY)
    clock.now += WORKER_LEASE_S
    assert not roster.view().workers
    assert roster.deregister("w", 3)
    assert roster.left() == ("w",)
    with pytest.raises(StaleWorker):
        roster.register(of_epoch(2), READY)  # late
    clock.now += EPOCH_KEEP_S
    roster.view()
    assert roster.left() == ()


def test_a_drain_applies_to_all_workers_of_a_name(roster):
    def comes(worker_id):
        assert roster.register(of_epoch(0, worker_id, name="w"), READY) == ""
        drain = beat(roster, worker_id).drain
        assert roster.view().workers[worker_id].placeable is not drain
        return drain

    register(roster, "nameless")
    assert not comes("w.1")
    roster.drain({"w", "nameless", "nobody"})
    assert beat(roster, "w.1").drain
    assert beat(roster, "nameless").drain
    roster.deregister("w.1")
    assert comes("w.2")
    roster.drain({"nameless"})
    assert not beat(roster, "w.2").drain
    assert beat(roster, "nameless").drain
    assert not comes("w.3")


def test_bookings_survive_restarts_of_a_worker(roster, ledger, clock):
    register(roster, "d")
    book(roster, ledger, need(prompt=100, new=10), "d")
    booked = Reserved(100, 1, 8, 0)
    before = roster.view().workers["d"]
    assert before.reserved == booked
    register(roster, "d")
    assert roster.view().workers["d"].reserved is before.reserved
    for goes in (lambda: roster.deregister("d"), lambda: setattr(clock, "now", clock.now + WORKER_LEASE_S)):
        goes()
        assert not roster.view().workers
        register(roster, "d")
        assert roster.view().workers["d"].reserved == booked
    roster.deregister("d")
    ledger.report(report(finished=[Attempt("r", 1)]))
    register(roster, "d")
    book(roster, ledger, need("s", prompt=100, new=10), "d")
    clock.now += BOOKING_LEASE_S
    ledger.sweep()
    register(roster, "d")
    assert roster.view().workers["d"].reserved == Reserved()


def drafting(name, method, reference):
    load = pb.WorkerLoad(drafting=pb.Drafting(learned_reference=reference))
    who = identity(name, speculative_method=method)
    return WorkerRecord(who, READY, load, Reserved(), False, 5.0)


def test_each_worker_gets_the_best_reference_of_the_others_with_its_method(clock):
    peers = Peers(clock)
    workers = [drafting("a", "eagle", 0.5), drafting("b", "eagle", 0.8), drafting("c", "mtp", 0.9)]
    view = FleetView({one.worker_id: one for one in workers})
    assert [peers.reference(name, view) for name in "abc"] == [0.8, 0.5, 0.0]
    view.workers["a"].load = pb.WorkerLoad(drafting=pb.Drafting(learned_reference=0.95))
    assert peers.reference("b", view) == 0.5  # cached
    clock.now += PEERS_AGE_S
    assert [peers.reference(name, view) for name in "abc"] == [0.8, 0.95, 0.0]
    assert peers.reference("gone", view) == 0.0
