"""The best draft acceptance of a worker's peers."""

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.roster import PEERS_AGE_S, Peers
from baton.scheduler.types import FleetView, Reserved, WorkerRecord
from harness.scheduling import identity


def drafting(name, method, reference):
    load = pb.WorkerLoad(drafting=pb.Drafting(learned_reference=reference))
    who = identity(name, speculative_method=method)
    return WorkerRecord(who, pb.WORKER_STATE_READY, load, Reserved(), False, 5.0)


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
