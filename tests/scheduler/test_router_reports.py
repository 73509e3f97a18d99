"""A router's reports to fake schedulers."""

import asyncio
import random
import time

import pytest

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler import exchange
from baton.scheduler.errors import Refused, SchedulerUnavailable
from baton.scheduler.exchange import BATCH, PLACE_TIMEOUT_S, QUEUED_EVENTS, REPORT_TIMEOUT_S
from baton.scheduler.router_reports import Reports
from baton.scheduler.types import Booking
from harness.scheduling import held as held_by
from harness.scheduling import until
from harness.support import PATIENCE

HERE, THERE = "here:1", "there:1"


class Wire:
    """A fake scheduler. The first `failures` calls raise `error`."""

    def __init__(self):
        self.sent = []
        self.calls = 0
        self.lost = []
        self.fenced = []
        self.generation = ""
        self.open = asyncio.Event()  # answers come once it is set
        self.open.set()
        self.delay_s = 0.0
        self.failures = 0
        self.error = SchedulerUnavailable

    async def __call__(self, message, timeout_s):
        assert timeout_s == (PLACE_TIMEOUT_S if message.needs else REPORT_TIMEOUT_S)
        await asyncio.sleep(self.delay_s)
        await self.open.wait()
        request = message.report
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error("nobody there")
        self.sent.append(request)
        report = pb.ReportReply(
            lost=[one for one in self.lost if one in request.renewed],
            fenced=[one for one in self.fenced if one in request.renewed],
            generation=self.generation,
        )
        return pb.ExchangeReply(report=report)


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
async def reporter(wire):
    made = Reports({HERE: wire}, lambda: HERE)
    yield made
    await made.close()


@pytest.fixture
async def pair():
    made = Pair()
    yield made
    await made.reports.close()


def live(request_id, epoch=1):
    attempt = Attempt(request_id, epoch)
    return Booking(attempt, "router", "p", "d", prompt_tokens=100, blocks=7)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(exchange, "RETRY_S", 0.01)


async def test_events_are_sent_together(wire, reporter):
    for number in range(100):
        reporter.prefilled(Attempt(f"r{number}", 1))
        reporter.finished(Attempt(f"r{number}", 1), "stop", pb.Cost(output_tokens=number))
    await until(lambda: bool(wire.sent))
    assert len(wire.sent) == 1
    assert len(wire.sent[0].prefilled) == len(wire.sent[0].finished) == 100
    assert wire.sent[0].finished[99].cost.output_tokens == 99


async def test_batches_and_queue_are_bounded(wire, reporter):
    for _ in range(QUEUED_EVENTS + 3):
        reporter.finished(Attempt("r", 1), "stop")
    assert reporter.dropped == 3
    await reporter.close()  # sends the rest
    assert sum(len(one.finished) for one in wire.sent) == QUEUED_EVENTS
    assert max(len(one.finished) for one in wire.sent) == BATCH


async def test_bookings_are_reported_again_after_events_were_dropped(wire, reporter):
    reporter.hold(live("held"), 30.0, booked_by=HERE)
    for _ in range(QUEUED_EVENTS):
        reporter.prefilled(Attempt("another", 1))
    reporter.prefilled(Attempt("held", 1))
    assert reporter.dropped == 1
    await until(
        lambda: any(
            one.attempt.request_id == "held" and one.prefilled for sent in wire.sent for one in sent.placed
        )
    )


async def test_sums_are_those_of_the_bookings(reporter):
    draw = random.Random(5)
    for _ in range(2_000):
        name = f"r{draw.randrange(30)}"
        held = reporter._held.get(name)
        match draw.choice(("hold", "prefilled", "shared", "finished")):
            case "hold":
                reporter.hold(live(name, held.attempt.epoch + 1 if held else 1), 30.0, booked_by=HERE)
            case "prefilled" if held:
                reporter.prefilled(held.attempt)
            case "shared" if held:
                reporter.shared(held.attempt, draw.randrange(4))
            case "finished" if held:
                reporter.finished(held.attempt, "stop")
        assert reporter.reserved == held_by(reporter._held.values())
    await reporter.close()
    assert reporter.reserved == {}


async def test_a_refused_batch_is_dropped(wire, reporter):
    wire.failures, wire.error = 1, Refused
    reporter.finished(Attempt("r", 1), "stop")
    await until(lambda: reporter.dropped == 1)
    assert wire.calls == 1
    reporter.finished(Attempt("next", 1), "stop")
    await until(lambda: [one.finished[0].attempt.request_id for one in wire.sent] == ["next"])


async def test_renewals_resume_after_an_outage(wire, reporter):
    wire.failures = 5
    reporter.hold(live("held"), 0.03, booked_by=HERE)
    reporter.prefilled(Attempt("r", 1))
    await until(lambda: any(one.renewed for one in wire.sent))


async def test_close_gives_up_in_time(wire, reporter, monkeypatch):
    monkeypatch.setattr(exchange, "CLOSE_S", 0.05)
    wire.open.clear()
    reporter.finished(Attempt("r", 1), "stop")
    began = time.monotonic()
    await reporter.close()
    assert time.monotonic() - began < PATIENCE


async def test_bookings_are_renewed_three_times_per_lease(wire, reporter):
    began = time.monotonic()
    reporter.hold(live("a"), 0.3, booked_by=HERE)
    reporter.hold(live("b"), 0.3, booked_by=HERE)
    reporter.hold(live("a", 2), 0.3, booked_by=HERE)  # replaces the first one
    await until(lambda: sum(bool(one.renewed) for one in wire.sent) >= 3)
    assert 0.28 <= time.monotonic() - began < PATIENCE
    renewals = [[(one.request_id, one.epoch) for one in sent.renewed] for sent in wire.sent]
    assert renewals[0] == [("a", 2), ("b", 1)]
    reporter.finished(Attempt("a", 1), "retried")  # an old epoch
    assert reporter.held == 2
    reporter.finished(Attempt("a", 2), "stop")
    reporter.finished(Attempt("b", 1), "stop")
    assert reporter.held == 0


async def test_a_lost_booking_is_reported_again_and_a_fenced_one_is_not(wire, reporter):
    wire.lost = [pb.Attempt(request_id="a", epoch=1)]
    wire.fenced = [pb.Attempt(request_id="b", epoch=1)]
    reporter.hold(live("a"), 0.03, booked_by=HERE)
    reporter.hold(live("b"), 0.03, booked_by=HERE)
    reporter.prefilled(Attempt("a", 1))
    await until(lambda: any(one.placed for one in wire.sent))
    again = next(one.placed for one in wire.sent if one.placed)
    assert [(one.attempt.request_id, one.prefilled, one.blocks) for one in again] == [("a", True, 7)]
    assert reporter.held == 2


async def test_a_new_generation_gets_all_bookings(wire, reporter):
    wire.generation = "one"
    reporter.hold(live("a"), 30.0)
    reporter.hold(live("b"), 30.0, booked_by=HERE)

    def placed():
        return [[one.attempt.request_id for one in sent.placed] for sent in wire.sent if sent.placed]

    await until(lambda: placed() == [["a"]])
    wire.generation = "two"
    reporter.finished(Attempt("other", 1), "stop")
    await until(lambda: placed() == [["a"], ["a", "b"]])
    reporter.saw_generation("", HERE)
    reporter.saw_generation("two", HERE)
    reporter.finished(Attempt("other", 1), "stop")
    await reporter.close()
    assert placed() == [["a"], ["a", "b"]]


async def test_a_new_generation_gets_all_bookings_at_once_after_a_failed_placement(wire, reporter):
    wire.generation = "one"
    reporter.hold(live("a"), 30.0)
    await until(lambda: [len(one.placed) for one in wire.sent] == [1])
    wire.failures = 2  # the second call fails
    with pytest.raises(SchedulerUnavailable):
        await reporter.exchanges[HERE].ask(pb.Need())
    reporter.saw_generation("two", HERE)
    await until(lambda: [len(one.placed) for one in wire.sent] == [1, 1])


class Pair:
    """Reports to two schedulers. HERE is the router's home by default."""

    def __init__(self):
        self.here, self.there = Wire(), Wire()
        self.home = HERE
        self.released = 0
        self.reports = Reports({HERE: self.here, THERE: self.there}, lambda: self.home)
        self.reports.on_released = self._release

    def _release(self):
        self.released += 1


def heard(wire, kind):
    events = (event for sent in wire.sent for event in getattr(sent, kind))
    return [getattr(event, "attempt", event).request_id for event in events]


async def test_a_booking_is_reported_to_others_and_its_events_to_all(pair):
    pair.reports.hold(live("by-here"), 30.0, booked_by=HERE)
    pair.reports.hold(live("alone"), 30.0)
    pair.reports.shared(Attempt("by-here", 1), 3)
    pair.reports.prefilled(Attempt("by-here", 1))
    pair.reports.finished(Attempt("by-here", 1), "stop", pb.Cost(output_tokens=9))
    await until(lambda: all(heard(wire, "finished") == ["by-here"] for wire in (pair.here, pair.there)))
    assert heard(pair.here, "placed") == ["alone"]
    assert heard(pair.there, "placed") == ["by-here", "alone"]
    for wire in (pair.here, pair.there):
        assert heard(wire, "prefilled") == heard(wire, "shared") == ["by-here"]
        assert wire.sent[0].shared[0].blocks == 4
        assert wire.sent[0].finished[0].cost.output_tokens == 9


async def test_an_unreachable_scheduler_delays_no_other_and_gets_everything_later(pair):
    pair.there.failures = 10
    for number in range(3):
        pair.reports.hold(live(f"r{number}"), 30.0, booked_by=HERE)
        pair.reports.finished(Attempt(f"r{number}", 1), "stop")
    await until(lambda: len(heard(pair.here, "finished")) == 3)
    assert not pair.there.sent
    await until(lambda: heard(pair.there, "placed") == heard(pair.there, "finished") == ["r0", "r1", "r2"])
    assert pair.reports.dropped == 0


async def test_old_events_are_dropped_during_an_outage(pair, monkeypatch):
    monkeypatch.setattr(exchange, "KEEP_S", 0.05)
    pair.there.failures = 1_000_000
    pair.reports.finished(Attempt("r", 1), "stop")
    there = pair.reports.exchanges[THERE]
    await until(lambda: there.dropped == 1)
    assert heard(pair.here, "finished") == ["r"]
    assert pair.reports.dropped == 0


async def test_a_new_generation_gets_bookings_instead_of_queued_events(pair):
    pair.here.generation = pair.there.generation = "one"
    for number in range(3):
        pair.reports.hold(live(f"r{number}"), 30.0, booked_by=HERE)
    pair.reports.finished(Attempt("r0", 1), "stop")
    await until(lambda: heard(pair.there, "finished") == heard(pair.here, "finished") == ["r0"])
    before = len(pair.there.sent)
    pair.there.generation = "two"
    pair.reports.prefilled(Attempt("r1", 1))
    pair.reports.saw_generation("two", THERE)  # the snapshot names it
    pair.reports.finished(Attempt("r2", 1), "stop")
    await until(lambda: "r2" in heard(pair.there, "finished"))
    sent = pair.there.sent[before:]
    assert [(one.attempt.request_id, one.prefilled) for part in sent for one in part.placed] == [("r1", True)]
    assert not any(part.prefilled for part in sent)
    assert heard(pair.here, "placed") == []


async def test_a_fenced_attempt_continues_with_a_later_epoch(pair):
    """A scheduler has the end of a later epoch, whose placement got no reply."""
    pair.there.fenced = [pb.Attempt(request_id="a", epoch=1)]
    pair.reports.hold(live("a"), 0.03, booked_by=HERE)
    await until(lambda: any(one.renewed for one in pair.there.sent))
    assert pair.reports.hold_on(Attempt("a", 1), 3) == Attempt("a", 3)
    await until(lambda: any(one.attempt.epoch == 3 for sent in pair.there.sent for one in sent.placed))


async def test_nothing_is_renewed_before_it_was_reported(pair):
    """It would count as lost, and be reported twice."""
    pair.there.delay_s = 0.003
    for number in range(300):
        pair.reports.hold(live(f"r{number}"), 0.01, booked_by=HERE)
        await asyncio.sleep(0.0007)
    known = set()
    renewals = 0
    for sent in pair.there.sent:
        known.update(one.attempt.request_id for one in sent.placed)
        assert known.issuperset(one.request_id for one in sent.renewed)
        renewals += len(sent.renewed)
    assert renewals > 300


async def test_room_is_free_when_the_home_knows_of_it(pair):
    pair.here.open.clear()
    pair.reports.finished(Attempt("r", 1), "stop")
    await until(lambda: heard(pair.there, "finished") == ["r"])
    assert pair.released == 0
    pair.here.open.set()
    await until(lambda: pair.released == 1)


async def test_room_is_free_at_once_if_the_home_does_not_answer(pair):
    pair.there.failures = 1_000_000
    pair.home = THERE
    pair.reports.finished(Attempt("r", 1), "stop")
    await until(lambda: pair.released > 0)
    before = pair.released
    pair.reports.finished(Attempt("next", 1), "stop")
    assert pair.released == before + 1
