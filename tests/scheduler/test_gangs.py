"""Requests are placed on a gang only while all of its workers are ready, and have met in the same life."""

from __future__ import annotations

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.ledger import Ledger
from baton.scheduler.roster import Roster
from harness.scheduling import identity

READY, STARTING, DRAINING = pb.WORKER_STATE_READY, pb.WORKER_STATE_STARTING, pb.WORKER_STATE_DRAINING


class Workers:
    def __init__(self) -> None:
        self.roster = Roster("topic", 5.0, Ledger(15.0, lambda: 0.0), lambda: 0.0)

    def add(self, name: str, rank: int, life: str = "one", state: pb.WorkerState = READY) -> None:
        who = identity(name)
        who.name = f"gang.r{rank}"
        who.gang.CopyFrom(pb.Gang(name="gang", rank=rank, size=2, life=life))
        if state == STARTING:
            who.ClearField("capacity")
        assert not self.roster.register(who, state)

    @property
    def placeable(self) -> set[str]:
        return {one.worker_id for one in self.roster.view().workers.values() if one.placeable}


@pytest.fixture
def workers() -> Workers:
    one = Workers()
    one.add("a", 0)
    one.add("b", 1)
    assert one.placeable == {"a", "b"}
    return one


def test_a_gang_without_a_worker(workers: Workers) -> None:
    workers.roster.deregister("b")
    assert workers.placeable == set()
    workers.add("c", 1, state=STARTING, life="")
    assert workers.placeable == set()
    workers.add("c", 1, life="two")
    assert workers.placeable == set()
    workers.add("a2", 0, life="two")  # while the old one's lease still runs
    assert workers.placeable == {"a2", "c"}


def test_a_gang_of_which_one_drains(workers: Workers) -> None:
    workers.roster.heartbeat("b", DRAINING, pb.WorkerLoad())
    assert workers.placeable == set()


def test_a_gang_of_which_one_was_drained_by_name(workers: Workers) -> None:
    workers.roster.drain(["gang.r0"])
    assert workers.placeable == set()
    workers.roster.drain([])
    assert workers.placeable == {"a", "b"}


def test_others_are_placed_on_as_before(workers: Workers) -> None:
    assert not workers.roster.register(identity("alone"), READY)
    workers.roster.deregister("a")
    assert workers.placeable == {"alone"}


def test_the_newest_rank_0_leads(workers: Workers) -> None:
    gang = workers.roster.view().workers["a"].identity.gang.name
    workers.add("a-much-newer", 0, life="", state=STARTING)
    newest = workers.roster.view().workers["a-much-newer"].identity.address
    assert workers.roster.leader_of(gang) == newest
    workers.roster.deregister("a-much-newer")
    assert workers.roster.leader_of(gang) == workers.roster.view().workers["a"].identity.address
    workers.roster.deregister("a")
    assert not workers.roster.leader_of(gang)
    workers.roster.register(identity("alone"), READY)
    assert not workers.roster.leader_of("")
