"""The order of several routers' requests when all workers are full."""

from dataclasses import replace

import pytest

from baton.attempts import Attempt
from baton.scheduler.need import Adapter
from baton.scheduler.turns import HEARD_S, TOLERANCE_S, RouterTurns, SharedTurns
from harness.scheduling import need

WORKERS = {"p", "d"}


def asks(router, waited_s=0.0, **more):
    return replace(need(f"of-{router}", 1, 10), router_id=router, waited_s=waited_s, **more)


@pytest.fixture
def turns(clock):
    return RouterTurns(clock)


def test_the_oldest_request_goes_first(turns):
    turns.refused(asks("a", 5.0))
    assert turns.elder(asks("b"), WORKERS) == "a"
    assert turns.elder(asks("b", 7.0), WORKERS) == ""
    assert turns.elder(asks("b", 5.0 - TOLERANCE_S / 2), WORKERS) == ""
    assert turns.elder(asks("a", 0.0), WORKERS) == ""  # both are of the same router
    turns.placed(asks("a", 5.0))
    assert turns.elder(asks("b"), WORKERS) == ""


def test_a_placement_of_another_request_does_not_cost_a_router_its_turn(turns, clock):
    """A router's requests of a higher class are placed while one of a lower class waits."""
    turns.refused(asks("a", 60.0, priority=10))
    turns.placed(replace(asks("a"), attempt=Attempt("another", 1)))
    clock.now += 0.5
    assert turns.elder(asks("b", 5.0, priority=10), WORKERS) == "a"
    turns.placed(replace(asks("a"), attempt=Attempt("of-a", 2)))  # its next attempt
    assert turns.elder(asks("b", 5.0, priority=10), WORKERS) == ""


def test_silent_routers_and_schedulers_are_forgotten(turns, clock):
    elsewhere = RouterTurns(clock)
    elsewhere.refused(asks("c", 5.0))
    turns.refused(asks("a", 5.0))
    turns.hear([elsewhere.told()])
    clock.now += HEARD_S + 0.1
    assert turns.elder(asks("b"), WORKERS) == ""


def test_a_new_request_does_not_reserve_a_place(turns, clock):
    """Its router may have no queue, and never ask again."""
    turns.refused(asks("a"))
    clock.now += HEARD_S - 0.1
    assert turns.elder(asks("b"), WORKERS) == ""


def test_an_older_request_does_not_block_workers_that_it_cannot_use(turns):
    turns.refused(asks("a", 5.0, exclude=frozenset({"d"})))
    assert turns.elder(asks("b"), WORKERS) == ""
    assert turns.elder(asks("b"), {"p", "d2"}) == "a"
    turns.refused(asks("a", 5.0, model_fingerprint="old weights"))
    assert turns.elder(asks("b"), WORKERS) == ""
    turns.refused(asks("a", 5.0, adapter=Adapter("sql", "f5")))
    assert turns.elder(asks("b"), WORKERS) == ""
    assert turns.elder(asks("b", adapter=Adapter("sql", "f5")), WORKERS) == "a"
    turns.refused(asks("a", 5.0, vllm_version="0.31"))
    assert turns.elder(asks("b", vllm_version="0.32"), WORKERS) == ""


def test_the_class_counts_before_the_age(turns):
    turns.refused(asks("a", 2.0))
    assert turns.elder(asks("b", 60.0, priority=10), WORKERS) == "a"
    assert turns.elder(asks("b", 1.0, priority=-5), WORKERS) == ""
    turns.refused(asks("a", 60.0, priority=10))
    assert turns.elder(asks("b", 0.0), WORKERS) == ""
    assert turns.elder(asks("b", 0.0, priority=10), WORKERS) == "a"


def test_requests_at_other_schedulers_count(turns, clock):
    """They count by age, class, and the workers that they can use."""
    elsewhere = RouterTurns(clock)
    adapter = Adapter("a", "f1")
    elsewhere.refused(asks("a", 5.0, priority=1, exclude=frozenset({"x"}), adapter=adapter))
    clock.now += 0.5
    turns.hear([elsewhere.told()])
    mine = asks("b", 3.0, priority=1, adapter=adapter)
    assert turns.elder(mine, WORKERS) == "a"
    assert turns.elder(mine, {"x"}) == ""
    assert turns.elder(replace(mine, adapter=None), WORKERS) == ""
    assert turns.elder(replace(mine, priority=0), WORKERS) == ""
    # The other request is 5.5 s old, which is within the tolerance.
    assert turns.elder(replace(mine, waited_s=5.0), WORKERS) == ""
    assert turns.elder(replace(mine, router_id="a"), WORKERS) == ""
    assert not turns.told().heads  # not forwarded
    elsewhere.placed(asks("a"))
    turns.hear([elsewhere.told()])
    assert turns.elder(mine, WORKERS) == ""


async def test_schedulers_share_waiting_requests_through_the_store(store, clock):
    one, other = (RouterTurns(clock) for _ in range(2))
    mine, theirs = SharedTurns(store, one), SharedTurns(store, other)
    for each in (mine, theirs):
        await each.tend()
    one.refused(asks("a", 5.0))
    for each in (mine, theirs, mine):
        await each.tend()
    assert other.elder(asks("b"), WORKERS) == "a"
    assert one.elder(asks("b"), WORKERS) == "a"
    one.placed(asks("a", 5.0))
    for each in (mine, theirs):
        await each.tend()
    assert other.elder(asks("b"), WORKERS) == ""
