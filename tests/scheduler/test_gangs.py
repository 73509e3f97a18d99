"""The scheduler takes a gang as a whole: placements, drains, changes of role and numbers of workers."""

from contextlib import AsyncExitStack

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.autoscaler import Autoscaler, seen
from baton.scheduler.client import SchedulerClient
from baton.scheduler.ledger import Ledger
from baton.scheduler.members import Members
from baton.scheduler.metrics import Metrics
from baton.scheduler.roster import Roster, Settling
from baton.scheduler.service import SchedulerServer
from baton.scheduler.store.base import MemoryStore
from baton.scheduler.types import Told
from harness.scheduling import LEASE_S, Options, capacity, identity, until
from tests.scheduler.conftest import Changer

P, D = pb.ROLE_PREFILL, pb.ROLE_DECODE

READY, STARTING, DRAINING = pb.WORKER_STATE_READY, pb.WORKER_STATE_STARTING, pb.WORKER_STATE_DRAINING


def member(worker_id, gang, rank, life="one", role=pb.ROLE_MIXED):
    who = identity(worker_id, role)
    who.name = f"{gang}.r{rank}"
    who.gang.CopyFrom(pb.Gang(name=gang, rank=rank, size=2, life=life))
    return who


class Workers:
    def __init__(self):
        self.roster = Roster("topic", 5.0, Ledger(15.0, lambda: 0.0), lambda: 0.0)

    def add(self, name, rank, life="one", state=READY):
        who = member(name, "gang", rank, life)
        if state == STARTING:
            who.ClearField("capacity")
        assert not self.roster.register(who, state)

    @property
    def placeable(self):
        return {one.worker_id for one in self.roster.view().workers.values() if one.placeable}


@pytest.fixture
def workers():
    one = Workers()
    one.add("a", 0)
    one.add("b", 1)
    assert one.placeable == {"a", "b"}
    return one


def test_a_gang_without_a_worker(workers):
    workers.roster.deregister("b")
    assert workers.placeable == set()
    workers.add("c", 1, state=STARTING, life="")
    assert workers.placeable == set()
    workers.add("c", 1, life="two")
    assert workers.placeable == set()
    workers.add("a2", 0, life="two")  # while the old one's lease still runs
    assert workers.placeable == {"a2", "c"}


def test_a_gang_of_which_one_drains_keeps_nothing_from_others(workers):
    assert not workers.roster.register(identity("alone"), READY)
    workers.roster.heartbeat("b", DRAINING, pb.WorkerLoad())
    assert workers.placeable == {"alone"}


def test_a_gang_is_drained_by_its_name(workers):
    workers.roster.drain(["gang.r0"])
    assert workers.placeable == {"a", "b"}
    workers.roster.drain(["gang"])
    assert all(one.drain_asked for one in workers.roster.view().workers.values())
    workers.roster.drain([])
    assert workers.placeable == {"a", "b"}


def test_the_newest_rank_0_that_waits_leads(workers):
    gang = workers.roster.view().workers["a"].identity.gang.name
    assert not workers.roster.leader_of(gang), "it has met already"
    workers.add("a-new", 0, life="", state=STARTING)
    new = workers.roster.view().workers["a-new"].identity.address
    workers.add("a-much-newer", 0, life="", state=STARTING)
    newest = workers.roster.view().workers["a-much-newer"].identity.address
    assert workers.roster.leader_of(gang) == newest
    workers.roster.deregister("a-much-newer")
    assert workers.roster.leader_of(gang) == new
    workers.roster.deregister("a-new")
    assert not workers.roster.leader_of(gang)
    workers.roster.register(identity("alone"), READY)
    assert not workers.roster.leader_of("")


@pytest.fixture
async def gangs():
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(SchedulerServer(Options()))
        client = await stack.enter_async_context(SchedulerClient(server.address))
        found = {name: [Changer(), Changer()] for name in ("decode-1", "decode-10")}
        for name, workers in found.items():
            for rank, one in enumerate(workers):
                who = member(f"{name}.r{rank}.17", name, rank, f"{name}'s", D)
                await stack.enter_async_context(one.registered(client, who))
        yield client, found


async def roles(client, gang):
    workers = (await client.describe()).workers
    return {one.identity.role for one in workers if one.identity.gang.name == gang}


async def test_a_gangs_name_comes_before_ids_that_begin_with_it(gangs):
    client, found = gangs
    assert (await client.drain("decode-1")).worker_id == "decode-1"
    await until(lambda: all(one.session.draining.is_set() for one in found["decode-1"]))
    assert not any(one.session.draining.is_set() for one in found["decode-10"])
    assert (await client.drain("decode-10.r1")).worker_id == "decode-10"  # one means all
    await until(lambda: all(one.session.draining.is_set() for one in found["decode-10"]))
    assert list((await client.describe()).drained) == ["decode-1", "decode-10"]
    assert (await client.undrain("decode-1")).name == "decode-1"
    assert list((await client.describe()).drained) == ["decode-10"]


async def test_all_workers_of_a_gang_change_their_role_or_none(gangs):
    client, found = gangs
    found["decode-1"][1].refusal = "it is draining"
    assert "decode-1.r1.17 keeps its role: it is draining" in (await client.set_role("decode-1", P)).problem
    assert await roles(client, "decode-1") == {D}
    found["decode-1"][1].refusal = ""
    assert (await client.set_role("decode-1.r0", P)).worker_id == "decode-1"
    assert await roles(client, "decode-1") == {P}
    assert await roles(client, "decode-10") == {D}


def test_a_gang_is_one_worker_to_the_autoscaler(workers):
    assert not workers.roster.register(identity("alone", P), READY)
    for name, busy_s, computed in (("a", 4.0, 100), ("b", 0.0, 0), ("alone", 1.0, 7)):
        counts = pb.EngineCounts(busy_s=busy_s, computed_tokens=computed)
        workers.roster.heartbeat(name, READY, pb.WorkerLoad(running=1, free_blocks=99, counts=counts))
    for one in workers.roster.view().workers.values():
        one.role = one.identity.role = D if one.identity.HasField("gang") else P
        one.reserved.requests = 3
    gang, alone = seen(workers.roster.view(), Told(), 0.0).members
    assert (gang.worker_id, gang.name, gang.role, gang.requests) == ("a", "gang", D, 6)
    assert (gang.ready, gang.leaving, gang.flips) == (True, False, True)
    assert gang.load.running == 2
    assert (gang.load.counts.busy_s, gang.load.counts.computed_tokens) == (2.0, 100)
    assert gang.slots == 2 * capacity().max_num_seqs
    assert (alone.name, alone.requests, alone.load.counts.computed_tokens) == ("alone", 3, 7)
    workers.roster.deregister("b")
    (gang, _) = seen(workers.roster.view(), Told(), 0.0).members
    assert not gang.ready


async def test_a_gang_with_several_roles_gets_one(workers, monkeypatch):
    """For example if the scheduler died while it asked them."""
    asked = []

    async def set_role(worker, role, fence):
        asked.append((worker, role, fence))
        return ""

    monkeypatch.setattr("baton.scheduler.autoscaler.set_role", set_role)
    store = MemoryStore()
    scaler = Autoscaler(
        None, LEASE_S, store, workers.roster, Members(store), settling=Settling(0.0), metrics=Metrics()
    )
    first, second = workers.roster.view().workers.values()
    first.role, second.role = P, P
    await scaler._unite(workers.roster.view())
    assert not asked
    second.role = D
    await scaler._unite(workers.roster.view())
    assert asked == [(first, P, 0)]
