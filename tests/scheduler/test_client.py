"""The reporter's batches and a worker's session, against a real scheduler or a real stub of its calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler import reporter as reporter_module
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import NoCapacity, Refused, SchedulerUnavailable
from baton.scheduler.reporter import BATCH_EVENTS, QUEUED_EVENTS, Reporter
from baton.scheduler.service import SchedulerServer
from baton.scheduler.session import WorkerSession
from baton.scheduler.types import Booking, Known
from harness.scheduling import Options, capacity, free_port, identity, need, place, until
from harness.support import PATIENCE


class Wire:
    """Takes what a reporter sends; `failures` of the first calls find nobody."""

    def __init__(
        self, failures: int = 0, error: type[SchedulerUnavailable | Refused] = SchedulerUnavailable
    ) -> None:
        self.sent: list[pb.ReportRequest] = []
        self.calls = 0
        self.lost: list[pb.Attempt] = []
        self.fenced: list[pb.Attempt] = []
        self.generation = ""
        self._failures = failures
        self._error = error

    async def __call__(self, request: pb.ReportRequest) -> pb.ReportReply:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error("nobody there")
        self.sent.append(request)
        return pb.ReportReply(
            lost=[one for one in self.lost if one in request.renewed],
            fenced=[one for one in self.fenced if one in request.renewed],
            generation=self.generation,
        )


def live(request_id: str, epoch: int = 1) -> Known:
    attempt = Attempt(request_id, epoch)
    return Known(attempt, Booking(attempt, "router", "p", "d", prompt_tokens=100, blocks=7))


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "RETRY_S", 0.01)


async def test_events_go_out_together() -> None:
    wire = Wire()
    reporter = Reporter(wire)
    for number in range(100):
        reporter.prefilled(Attempt(f"r{number}", 1))
        reporter.finished(Attempt(f"r{number}", 1), "stop", pb.Cost(output_tokens=number))

    async def sent() -> bool:
        return bool(wire.sent)

    await until(sent)
    assert len(wire.sent) == 1
    assert len(wire.sent[0].prefilled) == len(wire.sent[0].finished) == 100
    assert wire.sent[0].finished[99].cost.output_tokens == 99
    await reporter.close()


async def test_batches_and_queue_are_bounded() -> None:
    wire = Wire()
    reporter = Reporter(wire)
    for _ in range(QUEUED_EVENTS + 3):
        reporter.prefilled(Attempt("r", 1))
    assert reporter.dropped == 3
    await reporter.close()  # sends what is left
    assert sum(len(one.prefilled) for one in wire.sent) == QUEUED_EVENTS
    assert max(len(one.prefilled) for one in wire.sent) == BATCH_EVENTS


async def test_a_batch_is_tried_again() -> None:
    wire = Wire(failures=3)
    reporter = Reporter(wire)
    reporter.finished(Attempt("r", 1), "stop")

    async def sent() -> bool:
        return bool(wire.sent)

    await until(sent)
    assert (wire.calls, reporter.dropped) == (4, 0)
    await reporter.close()


async def test_a_refused_batch_is_dropped() -> None:
    wire = Wire(failures=1, error=Refused)
    reporter = Reporter(wire)
    reporter.finished(Attempt("r", 1), "stop")

    async def dropped() -> bool:
        return reporter.dropped == 1

    await until(dropped)
    assert wire.calls == 1
    reporter.finished(Attempt("next", 1), "stop")

    async def sent() -> bool:
        return [one.finished[0].attempt.request_id for one in wire.sent] == ["next"]

    await until(sent)
    await reporter.close()


async def test_events_are_kept_while_nobody_answers_and_told_in_order() -> None:
    wire = Wire(failures=10)
    reporter = Reporter(wire)
    for number in range(3):
        reporter.hold(live(f"r{number}"), 30.0, tell=True)
        reporter.finished(Attempt(f"r{number}", 1), "stop")

    async def sent() -> bool:
        return bool(wire.sent)

    await until(sent)
    assert reporter.dropped == 0
    names = ["r0", "r1", "r2"]
    assert [one.attempt.request_id for one in wire.sent[0].placed] == names
    assert [one.attempt.request_id for one in wire.sent[0].finished] == names
    await reporter.close()


async def test_old_events_are_dropped_while_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "KEEP_S", 0.05)
    wire = Wire(failures=1_000_000)
    reporter = Reporter(wire)
    reporter.finished(Attempt("r", 1), "stop")

    async def dropped() -> bool:
        return reporter.dropped == 1

    await until(dropped)
    await reporter.close()


async def test_renewals_go_on_as_soon_as_somebody_answers() -> None:
    wire = Wire(failures=5)
    reporter = Reporter(wire)
    reporter.hold(live("held"), 0.03)
    reporter.prefilled(Attempt("r", 1))

    async def renewed() -> bool:
        return any(one.renewed for one in wire.sent)

    await until(renewed)
    await reporter.close()


async def test_close_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "CLOSE_S", 0.05)

    async def never(request: pb.ReportRequest) -> pb.ReportReply:
        await asyncio.Event().wait()
        raise AssertionError

    reporter = Reporter(never)
    reporter.finished(Attempt("r", 1), "stop")
    began = time.monotonic()
    await reporter.close()
    assert time.monotonic() - began < PATIENCE


async def test_what_is_held_is_renewed_thrice_a_lease_until_it_is_finished() -> None:
    wire = Wire()
    reporter = Reporter(wire)
    began = time.monotonic()
    reporter.hold(live("a"), 0.3)
    reporter.hold(live("b"), 0.3)
    reporter.hold(live("a", 2), 0.3)  # takes the first one's place

    async def renewed() -> bool:
        return sum(bool(one.renewed) for one in wire.sent) >= 3

    await until(renewed)
    assert 0.28 <= time.monotonic() - began < PATIENCE
    renewals = [[(one.request_id, one.epoch) for one in sent.renewed] for sent in wire.sent]
    assert renewals[0] == [("a", 2), ("b", 1)]
    reporter.finished(Attempt("a", 1), "retried")  # the old one: the new one stays held
    assert reporter.held == 2
    reporter.finished(Attempt("a", 2), "stop")
    reporter.finished(Attempt("b", 1), "stop")
    assert reporter.held == 0
    await reporter.close()


async def test_a_lost_booking_is_told_again_and_a_fenced_one_dropped() -> None:
    wire = Wire()
    wire.lost = [pb.Attempt(request_id="a", epoch=1)]
    wire.fenced = [pb.Attempt(request_id="b", epoch=1)]
    reporter = Reporter(wire)
    reporter.hold(live("a"), 0.03)
    reporter.hold(live("b"), 0.03)
    reporter.prefilled(Attempt("a", 1))

    async def told() -> bool:
        return any(one.placed for one in wire.sent)

    await until(told)
    again = next(one.placed for one in wire.sent if one.placed)
    assert [(one.attempt.request_id, one.read, one.blocks) for one in again] == [("a", True, 7)]
    assert reporter.held == 1
    await reporter.close()


async def test_another_generation_is_told_all_that_is_held() -> None:
    wire = Wire()
    wire.generation = "one"
    reporter = Reporter(wire)
    reporter.hold(live("a"), 30.0, tell=True)
    reporter.hold(live("b"), 30.0)

    async def placed() -> list[list[str]]:
        return [[one.attempt.request_id for one in sent.placed] for sent in wire.sent if sent.placed]

    async def first() -> bool:
        return await placed() == [["a"]]

    await until(first)
    wire.generation = "two"
    reporter.finished(Attempt("other", 1), "stop")

    async def all_told() -> bool:
        return await placed() == [["a"], ["a", "b"]]

    await until(all_told)
    reporter.saw_generation("")  # of one that knows none
    reporter.saw_generation("two")
    reporter.finished(Attempt("other", 1), "stop")
    await reporter.close()
    assert await all_told()


@pytest.fixture
async def server() -> AsyncIterator[SchedulerServer]:
    async with SchedulerServer(Options(heartbeat_s=0.05, placement_lease_s=0.4)) as running:
        yield running


@pytest.fixture
async def client(server: SchedulerServer) -> AsyncIterator[SchedulerClient]:
    async with SchedulerClient(server.address) as made:
        yield made


async def test_a_placement_is_held_by_the_client_that_made_it(server: SchedulerServer) -> None:
    async with SchedulerClient(server.address) as operator:
        async with SchedulerClient(server.address, router_id="router") as router:
            await router.register(identity("m"), pb.WORKER_STATE_READY)
            await place(router, "held", 1, 1, 1)
            for number in range(3):  # three leases, each as long as the held one's
                async with SchedulerClient(server.address) as dies:
                    await place(dies, f"left{number}", 1, 1, 1)

                async def left_gone() -> bool:
                    return len((await operator.describe()).attempts) == 1

                await until(left_gone)
            assert [one.attempt.request_id for one in (await operator.describe()).attempts] == ["held"]

        async def gone() -> bool:
            return not (await operator.describe()).attempts

        await until(gone)  # the router is away: its lease runs out


async def test_a_workers_life(client: SchedulerClient) -> None:
    loads = iter(range(1_000))
    starting = identity("m")
    starting.ClearField("capacity")  # its engine still loads
    session = WorkerSession(client, starting, lambda: pb.WorkerLoad(running=next(loads)))
    await session.start(1)
    assert session.registered

    async def status() -> pb.WorkerStatus:
        workers = (await client.describe()).workers
        return workers[0] if workers else pb.WorkerStatus()

    assert (await status()).state == pb.WORKER_STATE_STARTING
    with pytest.raises(NoCapacity, match="none is ready"):
        await place(client, "r", 1, 1, 1)
    await session.ready(capacity())
    await place(client, "r", 1, 1, 1)

    async def heard() -> bool:
        return (await status()).load.running >= 2

    await until(heard)
    assert (await client.drain("m")).worker_id == "m"
    async with asyncio.timeout(2 * PATIENCE):
        await session.draining.wait()

    async def drains() -> bool:
        return (await status()).state == pb.WORKER_STATE_DRAINING

    await until(drains)
    await session.close()
    assert not (await client.describe()).workers


async def test_a_drained_worker_that_comes_back_waits_to_be_undrained(client: SchedulerClient) -> None:
    """Its first life ends; its next one stays, takes nothing, and takes requests as soon as it may."""

    def life(number: int) -> WorkerSession:
        one = identity(f"m.{number}")
        one.name = "m"
        return WorkerSession(client, one, pb.WorkerLoad)

    async def asked() -> list[tuple[str, bool]]:
        workers = (await client.describe()).workers
        return [
            (pb.WorkerState.Name(one.state).removeprefix("WORKER_STATE_"), one.drained) for one in workers
        ]

    first = life(1)
    await first.start(1)
    await first.ready(capacity())
    assert (await client.drain("m.1")).worker_id == "m.1"
    async with asyncio.timeout(20 * PATIENCE):
        await first.draining.wait()
    await first.close()
    assert list((await client.describe()).drained) == ["m"]
    second = life(2)
    await second.start(1)
    await second.ready(capacity())

    async def held() -> bool:
        return bool(second.held)

    await until(held)
    assert await asked() == [("DRAINING", True)]
    with pytest.raises(NoCapacity, match="none is ready"):
        await place(client, "r", 1, 1, 1)
    assert not second.draining.is_set()
    assert (await client.undrain("m.2")).name == "m"  # by the id of any life

    async def not_held() -> bool:
        return not second.held

    await until(not_held)
    assert await asked() == [("READY", False)]
    await place(client, "r", 2, 1, 1)
    assert (await client.drain("m.2")).worker_id == "m.2"  # from now on as for the first one
    async with asyncio.timeout(20 * PATIENCE):
        await second.draining.wait()
    await second.close()


async def test_a_worker_that_drains_by_itself_is_seen_at_once() -> None:
    async with (
        SchedulerServer(Options(heartbeat_s=60.0)) as server,
        SchedulerClient(server.address) as client,
    ):
        session = WorkerSession(client, identity("m"), pb.WorkerLoad)
        await session.start(1)
        await session.ready(capacity())
        session.drain()

        async def drains() -> bool:
            return (await client.describe()).workers[0].state == pb.WORKER_STATE_DRAINING

        await until(drains)
        await session.ready(capacity())  # an engine that comes up late does not undo it
        assert await drains()
        await session.close()


async def test_a_forgotten_worker_registers_again(client: SchedulerClient) -> None:
    session = WorkerSession(client, identity("m"), pb.WorkerLoad)
    await session.start(1)
    await session.ready(capacity())
    await client.deregister("m")

    async def back() -> bool:
        workers = (await client.describe()).workers
        return bool(workers) and workers[0].state == pb.WORKER_STATE_READY

    await until(back)
    await session.close()


async def test_start_waits_for_the_scheduler_and_not_forever() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with SchedulerClient(address) as client:
        began = time.monotonic()
        with pytest.raises(SchedulerUnavailable):
            await WorkerSession(client, identity("m"), pb.WorkerLoad).start(0.6)
        assert time.monotonic() - began < 2 * PATIENCE
        late = WorkerSession(client, identity("m"), pb.WorkerLoad)
        starting = asyncio.create_task(late.start(10))
        async with SchedulerServer(Options(address=address)):
            await starting
            assert late.registered
            await late.close()


async def test_a_refused_worker_does_not_start(client: SchedulerClient) -> None:
    await client.register(identity("first"), pb.WORKER_STATE_READY)
    other = identity("m")
    other.model = "large"
    with pytest.raises(Refused, match="model 'large' here"):
        await WorkerSession(client, other, pb.WorkerLoad).start(5)


async def test_close_is_quick_when_the_scheduler_is_away() -> None:
    server = SchedulerServer(Options())
    await server.__aenter__()
    client = SchedulerClient(server.address)
    session = WorkerSession(client, identity("m"), pb.WorkerLoad)
    await session.start(1)
    await server.__aexit__(None, None, None)
    began = time.monotonic()
    await session.close()
    await client.close()
    assert time.monotonic() - began < 2.5 * PATIENCE


async def test_a_need_of_another_router_is_not_placed(client: SchedulerClient) -> None:
    """Nobody would renew its lease: this client reports as its own router."""
    theirs = need(router_id="another")
    with pytest.raises(ValueError, match="a need of router 'another' is placed as router ''"):
        await client.place(theirs)
    with pytest.raises(ValueError, match="a need of router 'another'"):
        client.place_alone(theirs)
