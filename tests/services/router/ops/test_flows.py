from baton.services.router.ops.feed import MOST_PAIRS, WINDOW_S, Flows
from harness.scheduling import Clock
from tests.services.router.ops.records import record


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
