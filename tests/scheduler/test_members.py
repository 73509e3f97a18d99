"""The processes of a deployment and their metrics addresses; lost workers."""

import pytest

from baton import rpc
from baton.protos import scheduler_pb2 as pb
from baton.scheduler import members as module
from baton.scheduler.client import SchedulerClient
from baton.scheduler.members import Member, Members, members, targets
from baton.scheduler.metrics import Metrics
from baton.scheduler.service import SchedulerServer
from baton.scheduler.types import FleetView, Reserved, WorkerRecord
from harness.scheduling import Options, identity, until, until_told

P, D = pb.ROLE_PREFILL, pb.ROLE_DECODE


def process(name, kind="router", address="10.0.0.1:9402"):
    return pb.Process(id=name, kind=kind, host="here", metrics_address=address)


async def test_schedulers_share_what_they_know_of_processes(store, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    one, other = Members(store), Members(store)
    one.introduce(process("s1", "scheduler"))
    other.introduce(process("s2", "scheduler"))
    one.hear(process("r1"))
    for each in (one, other, one):
        await each.tend()
    assert [known.id for known in one.known] == ["s1", "r1", "s2"]
    assert [known.id for known in other.known] == ["s2", "r1", "s1"]
    one.hear(process("r1", address=""))  # it is leaving
    await other.leave()

    async def alone():
        await one.tend()
        return [known.id for known in one.known] == ["s1"]

    await until(alone)


async def test_known_processes_stay_while_the_store_is_unreachable(store, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    one = Members(store)
    one.hear(process("r1"))
    await one.tend()
    monkeypatch.setattr(store, "problem", "it does not answer")
    monkeypatch.setattr(store, "told", None)  # must not be called
    await one.tend()
    assert [known.id for known in one.known] == ["r1"]


def test_targets_need_an_address():
    worker = identity("d.1", D)
    silent = identity("p.1", P)
    worker.host, worker.metrics_address = rpc.host_id(), "127.0.0.1:4711"
    known = members([worker, silent], [process("r1"), process("r2", address="")])
    assert known == [
        Member("r1", "router", "here", "10.0.0.1:9402"),
        Member("d.1", "decode", rpc.host_id(), "127.0.0.1:4711"),
        Member("p.1", "prefill", "here", ""),
    ]
    assert targets(known) == [
        {"targets": ["10.0.0.1:9402"], "labels": {"instance": "r1", "role": "router"}},
        {"targets": ["127.0.0.1:4711"], "labels": {"instance": "d.1", "role": "decode"}},
    ]


@pytest.mark.parametrize("address", ["127.0.0.1:9402", "[::1]:9402", "localhost:9402", "no address"])
def test_an_unreachable_process_is_not_a_target(address):
    assert not targets([Member("r1", "router", "another host", address)])


async def test_a_router_is_known_from_its_first_snapshot_until_it_leaves():
    async with SchedulerServer(Options()) as server, SchedulerClient(server.address) as operator:
        router = SchedulerClient(server.address, router_id="r1")
        router.process = process("r1")
        await router.refresh()
        await until_told(operator, lambda told: [one.id for one in told.processes] == ["r1"])

        async def told():
            await router.refresh()  # the feed is refreshed twice a second
            return [one.id for one in router.standby.fleet.processes] == ["r1"]

        await until(told)
        await router.close()
        await until_told(operator, lambda told: not told.processes)


# -- losses


def view(*names):
    workers = {
        name: WorkerRecord(identity(name, D), pb.WORKER_STATE_READY, None, Reserved(), False, 0.0)
        for name in names
    }
    return FleetView(workers)


class Look:
    """Look at these workers, and return how many were lost so far."""

    def __init__(self):
        self._metrics = Metrics()

    def __call__(self, *names, left=(), unsure=False):
        self._metrics.lost(view(*names), left, unsure=unsure)
        name = "baton_scheduler_workers_lost_total"
        return self._metrics.registry.get_sample_value(name, {"role": "decode"}) or 0.0


def test_a_worker_is_lost_once_unless_it_deregistered_or_the_scheduler_settles():
    look, leaving, settling = Look(), Look(), Look()
    assert [look("a", "b"), look("b"), look("b"), look("a", "b"), look("b")] == [0, 1, 1, 1, 2]
    assert [leaving("a", "b"), leaving("b", left=("a",)), leaving("b")] == [0, 0, 0]
    settling("a", "b")
    assert [settling("b", unsure=True) for _ in range(2)] == [0, 0]
    assert settling("a", "b") == 0
    settling("a", unsure=True)
    assert settling("a") == 1


def test_roles_without_workers_are_zero():
    metrics = Metrics()
    metrics.seen(FleetView({}), 0)
    for role in ("prefill", "decode", "mixed"):
        labels = {"role": role, "state": "ready"}
        assert metrics.registry.get_sample_value("baton_scheduler_workers", labels) == 0
