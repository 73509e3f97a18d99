"""A router's messages to a real scheduler: batches of placements, with reports."""

import asyncio

import pytest

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler import exchange as reporter_module
from baton.scheduler.client import SchedulerClient
from baton.scheduler.endpoints import Endpoints
from baton.scheduler.errors import SchedulerUnavailable
from baton.scheduler.exchange import MOST
from baton.scheduler.need import need_to_wire
from baton.scheduler.router_reports import Reports
from baton.scheduler.service import SchedulerServer
from harness.scheduling import Options, identity, need, place, until, until_told
from harness.support import PATIENCE, free_port


class Line:
    """A router's exchange that records its messages, and delays them while `held` is clear."""

    def __init__(self, address):
        self._schedulers = Endpoints(address)
        self._address = address
        self.sent = []
        self.held = asyncio.Event()
        self.held.set()
        self.answered = lambda: None
        self.reports = Reports({address: self._send}, lambda: address)

    async def ask(self, name, prompt_tokens=1):
        message = need_to_wire(need(name, 1, 1, 1))
        message.prompt_tokens = prompt_tokens
        return await self.reports.exchanges[self._address].ask(message)

    @property
    def sizes(self):
        """The number of placements in each message that has any."""
        return [len(one.needs) for one in self.sent if one.needs]

    async def asked(self, size):
        """Wait for the first message, with this many placements."""
        await until(lambda: self.sizes == [size])

    async def close(self):
        await self.reports.close()
        await self._schedulers.close()

    async def _send(self, message, timeout_s):
        self.sent.append(message)
        await self.held.wait()
        reply = await self._schedulers.ask(self._schedulers.pick(), "Exchange", message, timeout_s)
        self.answered()
        return reply


@pytest.fixture
async def operator():
    async with SchedulerServer(Options()) as server, SchedulerClient(server.address) as client:
        await client.register(identity("m", num_blocks=10_000, max_num_seqs=1_000), pb.WORKER_STATE_READY)
        yield client


@pytest.fixture
async def line(operator):
    made = Line(operator.address)
    yield made
    await made.close()


async def booked(operator):
    return sorted(one.attempt.request_id for one in (await operator.describe()).attempts)


async def test_waiting_requests_share_a_message(line):
    line.held.clear()
    names = [f"r{number}" for number in range(2 * MOST)]
    first = asyncio.create_task(line.ask("first"))
    await line.asked(1)  # sent at once
    others = [asyncio.create_task(line.ask(name)) for name in names]
    await asyncio.sleep(0)
    line.held.set()
    assert (await first).placement.request_id == "first"
    assert [reply.placement.request_id for reply in await asyncio.gather(*others)] == names
    assert line.sizes == [1, MOST, MOST]


async def test_a_malformed_request_does_not_affect_others(line, operator):
    found = await asyncio.gather(line.ask("first"), line.ask("bad", prompt_tokens=0), line.ask("good"))
    assert [reply.WhichOneof("outcome") for reply in found] == ["placement", "refusal", "placement"]
    assert found[1].refusal == "request 'bad' has no prompt tokens"
    assert await booked(operator) == ["first", "good"]


async def test_a_malformed_report_does_not_affect_placements(line):
    line.reports.exchanges[line._address].add(pb.Attempt(epoch=1))
    assert (await line.ask("r")).HasField("placement")
    assert line.sent[0].report.prefilled
    assert line.reports.dropped == 1


async def test_reports_wait_for_a_message_with_placements_unless_room_is_wanted(line, operator, monkeypatch):
    monkeypatch.setattr(reporter_module, "RIDE_S", 60.0)

    async def told(name):
        await until(
            lambda: name in [one.attempt.request_id for sent in line.sent for one in sent.report.finished]
        )

    await line.ask("first")
    line.reports.prefilled(Attempt("first", 1))
    line.reports.finished(Attempt("first", 1), "stop")
    await line.ask("second")
    assert [(len(one.needs), len(one.report.finished)) for one in line.sent] == [(1, 0), (1, 1)]
    assert (await line.ask("third")).HasField("placement")
    large = [await line.ask(f"large{number}", prompt_tokens=900) for number in range(2)]
    assert large[-1].HasField("rejection")
    line.reports.finished(Attempt("second", 1), "stop")
    await told("second")
    assert not line.sent[-1].needs


async def test_a_placement_can_use_room_reported_in_its_message(line):
    first, second = [await line.ask(name, prompt_tokens=900) for name in ("first", "second")]
    assert (first.HasField("placement"), second.HasField("rejection")) == (True, True)
    line.held.clear()
    stuck = asyncio.create_task(line.ask("stuck", prompt_tokens=900))
    await asyncio.sleep(0)
    line.reports.finished(Attempt("first", 1), "stop")
    late = asyncio.create_task(line.ask("late", prompt_tokens=900))
    await asyncio.sleep(0)
    line.held.set()
    replies = [(await one).WhichOneof("outcome") for one in (stuck, late)]
    assert "placement" in replies


@pytest.mark.parametrize(("ends", "text"), [("the scheduler", "does not answer"), ("the router", "given up")])
async def test_requests_behind_an_unanswered_message_fail_with_it(line, ends, text):
    line.held.clear()
    stuck = asyncio.create_task(line.ask("stuck"))
    await line.asked(1)
    behind = asyncio.create_task(line.ask("behind"))
    await asyncio.sleep(0)
    if ends == "the router":
        await line.close()
    else:
        line._schedulers = Endpoints(f"127.0.0.1:{free_port()}")
        line.held.set()
    for one in (stuck, behind):
        with pytest.raises(SchedulerUnavailable, match=text):
            await one
    assert line.sizes == [1]


async def test_a_placement_is_returned_if_its_caller_has_left(line, operator):
    line.held.clear()
    leaves = asyncio.create_task(line.ask("leaves"))
    await line.asked(1)
    leaves.cancel()
    line.held.set()

    await until(
        lambda: [end.attempt.request_id for one in line.sent for end in one.report.finished] == ["leaves"]
    )
    await until_told(operator, lambda told: not told.attempts)


async def test_a_placement_is_returned_if_its_caller_leaves_as_it_arrives(line, operator):
    leaves = asyncio.create_task(line.ask("leaves"))
    line.answered = lambda: asyncio.get_running_loop().call_soon(leaves.cancel)
    with pytest.raises(asyncio.CancelledError):
        await leaves

    await until_told(operator, lambda told: not told.attempts)


async def test_a_request_cancelled_before_the_message_is_not_sent(line, operator):
    line.held.clear()
    first = asyncio.create_task(line.ask("first"))
    await line.asked(1)
    left, stays = (asyncio.create_task(line.ask(name)) for name in ("left", "stays"))
    await asyncio.sleep(0)
    left.cancel()
    line.held.set()
    await asyncio.gather(first, stays)
    assert line.sizes == [1, 1]
    assert await booked(operator) == ["first", "stays"]


async def test_a_scheduler_stops_without_waiting_for_streams_and_the_next_one_is_found(monkeypatch):
    monkeypatch.setattr("baton.scheduler.service.STOP_GRACE_S", 60.0)
    options = Options(address=f"127.0.0.1:{free_port()}")
    async with SchedulerClient(options.address, router_id="router") as router:
        for name in ("first", "second"):
            async with SchedulerServer(options):
                await router.register(identity("m"), pb.WORKER_STATE_READY)
                await place(router, name, 1, 1, 1)
                began = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - began < 10 * PATIENCE
