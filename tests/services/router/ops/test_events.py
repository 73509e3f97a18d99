from baton.services.overview.workers import BAD, INFO, WARNING
from baton.services.router.ops.feed import KEPT_EVENTS as KEPT
from baton.services.router.ops.feed import MOST_PAIRS, WINDOW_S, Events, Flows
from harness.scheduling import Clock
from tests.services.overview.test_workers import row
from tests.services.router.ops.records import record


def said(events):
    return [(severity, text) for _, _, severity, text in events.after(0)]


def test_the_first_snapshot_is_no_event():
    events = Events()
    events.workers([row("a")])
    events.workers([row("a"), row("b")])
    assert said(events) == [(INFO, "b registered")]


def test_a_scheduler_falls_silent_and_comes_back():
    events = Events()
    for problem in ("not asked yet", "", "no answer in 1 s", "refused", ""):
        events.scheduler(problem)
    assert said(events) == [
        (BAD, "no scheduler answers: no answer in 1 s"),
        (INFO, "a scheduler answers again"),
    ]


def test_requests_that_lost_a_worker_or_failed():
    events = Events()
    events.over(record("fine"))
    events.over(record("moved", troubles=("lost",)))
    events.over(record("broken", outcome="error"))
    assert said(events) == [
        (WARNING, "request moved stop after 2 attempts; failed: worker d: lost"),
        (BAD, "request broken error after 1 attempts"),
    ]


def test_the_list_is_bounded_and_numbers_keep_growing():
    events = Events()
    for _ in range(KEPT + 10):
        events.add(INFO, "x")
    assert len(events.after(0)) == KEPT
    assert [number for number, *_ in events.after(KEPT + 8)] == [KEPT + 9, KEPT + 10]


def test_pairs_are_summed_and_the_busiest_comes_first():
    flows = Flows(Clock())
    for _ in range(3):
        flows.add(record(workers=("p0", "d1"), moved=10 << 20))
    flows.add(record(workers=("p1", "d1"), moved=5 << 20))
    flows.add(record(workers=(), outcome="refused"))
    assert flows.rows() == [["p0", "d1", 0.3, 3.0], ["p1", "d1", 0.1, 0.5]]


def test_a_window_is_forgotten():
    clock = Clock()
    flows = Flows(clock)
    flows.add(record(moved=1))
    clock.now += WINDOW_S - 0.1
    assert flows.rows()
    clock.now += 0.2
    assert flows.rows() == []


def test_a_message_is_bounded():
    flows = Flows()
    for number in range(MOST_PAIRS + 50):
        flows.add(record(workers=(f"p{number}", "d")))
    assert len(flows.rows()) == MOST_PAIRS
