"""Where the processes of a deployment serve their metrics, and what a scheduler loses sight of."""

from __future__ import annotations

from typing import Any

import pytest

from baton import rpc
from baton.protos import scheduler_pb2 as pb
from baton.scheduler import members as module
from baton.scheduler.client import SchedulerClient
from baton.scheduler.losses import Losses
from baton.scheduler.members import Member, Members, members, targets
from baton.scheduler.metrics import Metrics
from baton.scheduler.service import SchedulerServer
from baton.scheduler.session import WorkerSession
from baton.scheduler.store import Store
from baton.scheduler.types import FleetView, Reserved, WorkerRecord
from harness.scheduling import Options, RedisServer, identity, until

P, D = pb.ROLE_PREFILL, pb.ROLE_DECODE


def process(name: str, kind: str = "router", address: str = "10.0.0.1:9402") -> pb.Process:
    return pb.Process(id=name, kind=kind, host="here", metrics_address=address)


async def test_two_schedulers_know_each_other_and_the_routers_of_both(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    one, other = Members(store), Members(store)
    one.introduce(process("s1", "scheduler"))
    other.introduce(process("s2", "scheduler"))
    await one.hear(process("r1"))
    for each in (one, other, one):
        await each.tend()
    assert [known.id for known in one.known] == ["s1", "r1", "s2"]
    assert [known.id for known in other.known] == ["s2", "r1", "s1"]
    await one.hear(process("r1", address=""))  # it ends
    await other.leave()

    async def alone() -> bool:
        await one.tend()
        return [known.id for known in one.known] == ["s1"]

    await until(alone)


async def test_what_was_known_stays_while_the_store_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    one = Members(store)
    await one.hear(process("r1"))
    await one.tend()
    monkeypatch.setattr(store, "problem", "it does not answer", raising=False)
    monkeypatch.setattr(store, "told", None)  # not to be called
    await one.tend()
    assert [known.id for known in one.known] == ["r1"]


def test_targets_are_those_that_say_where_they_are() -> None:
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
def test_one_that_cannot_be_dialled_from_here_is_no_target(address: str) -> None:
    """As a target it would be shown as down for ever."""
    assert not targets([Member("r1", "router", "another host", address)])


async def test_a_snapshot_tells_of_the_router_that_asks_until_it_hangs_up() -> None:
    async with SchedulerServer(Options()) as server, SchedulerClient(server.address) as operator:
        router = SchedulerClient(server.address, router_id="r1")
        router.process = process("r1")
        await router.refresh()

        async def known() -> bool:
            return [one.id for one in (await operator.describe()).processes] == ["r1"]

        async def told() -> bool:
            await router.refresh()  # views are made anew some two times a second
            return [one.id for one in router.standby.processes] == ["r1"]

        await until(known)
        await until(told)
        await router.close()

        async def gone() -> bool:
            return not (await operator.describe()).processes

        await until(gone, 10)


async def test_a_heartbeat_brings_the_schedulers_clock() -> None:
    heard: list[tuple[float, float]] = []

    def listen(reply: pb.HeartbeatReply, took_s: float) -> None:
        heard.append((reply.clock_s, took_s))

    async with SchedulerServer(Options()) as server, SchedulerClient(server.address) as client:
        session = WorkerSession(client, identity("d.1", D), pb.WorkerLoad, listen)
        await session.start(5)
        await session.close()
    assert heard
    assert heard[0][0] > 1.7e9
    assert 0 < heard[0][1] < 30


# -- losses


LEASE_S = 5.0


def view(*names: str) -> FleetView:
    workers: dict[str, Any] = {
        name: WorkerRecord(identity(name, D), pb.WORKER_STATE_READY, None, Reserved(), False, LEASE_S)
        for name in names
    }
    return FleetView(workers, 0, 0)


class Look:
    """A scheduler's looks at its workers, and what it counted."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.now = 0.0
        self.losses = Losses(self.metrics, lambda: self.now)

    def __call__(
        self,
        *names: str,
        left: tuple[str, ...] = (),
        unsure: bool = False,
        away: bool = False,
        after_s: float = LEASE_S,
    ) -> float:
        self.now += after_s
        self.losses.look(view(*names), left, unsure=unsure, store_away=away)
        return self.value("workers_lost_total", role="decode")

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"baton_scheduler_{name}", labels)
        assert found is not None
        return found


def test_a_worker_that_goes_without_a_word_is_lost() -> None:
    look = Look()
    assert look("a", "b") == 0
    assert look("b") == 1
    assert look("b") == 1


def test_one_that_says_goodbye_is_not() -> None:
    look = Look()
    assert look("a", "b") == 0
    assert look("b", left=("a",)) == 0


def test_one_that_says_goodbye_to_another_scheduler_is_not() -> None:
    """A worker that is gone before its lease is over is not counted as lost."""
    look = Look()
    assert look("a", "b") == 0
    assert look("b", after_s=0.5) == 0
    assert look("b") == 0


def test_a_goodbye_while_the_store_is_away_is_remembered_for_as_long() -> None:
    look = Look()
    assert look("a", "b") == 0
    assert look("b", left=("a",), away=True) == 0
    assert look("b", away=True) == 0  # goodbyes are kept for a minute
    assert look("b") == 0
    assert look("b") == 0


async def test_two_schedulers_lose_nobody_who_says_goodbye_to_one(
    redis_server: RedisServer, topic: str
) -> None:
    settings = Options(store=redis_server.url, topic=topic, worker_lease_s=2.0)  # waited for once
    async with SchedulerServer(settings) as one, SchedulerServer(settings) as other:
        client = SchedulerClient(one.address)
        session = WorkerSession(client, identity("d.1", D), pb.WorkerLoad)
        await session.start(5)

        async def there() -> bool:
            return not other._settling and any(one.worker_id == "d.1" for one in other._workers)

        await until(there)
        await session.close()

        async def gone() -> bool:
            return not other._workers

        await until(gone)
        lost = "baton_scheduler_workers_lost_total"
        assert other.metrics.registry.get_sample_value(lost, {"role": "decode"}) == 0
        await client.close()


def test_nobody_is_missed_before_all_are_known_again() -> None:
    look = Look()
    look("a", "b")
    assert look("b", unsure=True) == 0
    assert look("b", unsure=True) == 0
    assert look("a", "b") == 0
    look("a", unsure=True)
    assert look("a") == 1


def test_a_store_that_is_away_is_counted_once_and_loses_nobody() -> None:
    look = Look()
    look("a")
    assert look(away=True) == 0
    assert look(away=True) == 0
    assert look() == 0  # the first look after: the store is empty still
    assert look.value("store_losses_total") == 1
    assert look("a") == 0


def test_every_role_is_shown_with_zeros() -> None:
    metrics = Metrics()
    metrics.seen(FleetView({}, 0, 0))
    for role in ("prefill", "decode", "mixed"):
        labels = {"role": role, "state": "ready"}
        assert metrics.registry.get_sample_value("baton_scheduler_workers", labels) == 0
