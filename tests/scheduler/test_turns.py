"""The order of several routers' requests where all workers are full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.attempts import Attempt
from baton.scheduler.need import Adapter, Need
from baton.scheduler.store import Store
from baton.scheduler.turns import HEARD_S, TOLERANCE_S, RouterTurns, SharedTurns
from harness.scheduling import Clock, need

WORKERS = {"p", "d"}


def asks(router: str, waited_s: float = 0.0, **more: Any) -> Need:
    return replace(need(f"of-{router}", 1, 10), router_id=router, waited_s=waited_s, **more)


@pytest.fixture
def turns(clock: Clock) -> RouterTurns:
    return RouterTurns(clock)


def test_who_has_waited_longest_comes_first(turns: RouterTurns) -> None:
    turns.refused(asks("a", 5.0))
    assert turns.elder(asks("b"), WORKERS) == "a"
    assert turns.elder(asks("b", 7.0), WORKERS) == ""
    assert turns.elder(asks("b", 5.0 - TOLERANCE_S / 2), WORKERS) == ""
    assert turns.elder(asks("a", 0.0), WORKERS) == ""  # its router chooses among its own
    turns.placed(asks("a", 5.0))
    assert turns.elder(asks("b"), WORKERS) == ""


def test_a_placement_of_another_request_does_not_cost_a_router_its_turn(
    turns: RouterTurns, clock: Clock
) -> None:
    """Requests of a class before the one that waits are placed at once, also of its own router."""
    turns.refused(asks("a", 60.0, priority=10))
    turns.placed(replace(asks("a"), attempt=Attempt("another", 1)))
    clock.now += 0.5
    assert turns.elder(asks("b", 5.0, priority=10), WORKERS) == "a"
    turns.placed(replace(asks("a"), attempt=Attempt("of-a", 2)))  # it, with its next try
    assert turns.elder(asks("b", 5.0, priority=10), WORKERS) == ""


def test_a_router_that_asks_no_more_is_not_waited_for(turns: RouterTurns, clock: Clock) -> None:
    turns.refused(asks("a", 5.0))
    clock.now += HEARD_S + 0.1
    assert turns.elder(asks("b"), WORKERS) == ""


def test_who_was_refused_once_may_never_ask_again(turns: RouterTurns, clock: Clock) -> None:
    """As routers that let nobody wait do: it must not cost the next one its place."""
    turns.refused(asks("a"))
    clock.now += HEARD_S - 0.1
    assert turns.elder(asks("b"), WORKERS) == ""


def test_places_that_the_elder_cannot_take_are_left_to_others(turns: RouterTurns) -> None:
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


def test_the_class_counts_before_the_age(turns: RouterTurns) -> None:
    turns.refused(asks("a", 2.0))
    assert turns.elder(asks("b", 60.0, priority=10), WORKERS) == "a"
    assert turns.elder(asks("b", 1.0, priority=-5), WORKERS) == ""
    turns.refused(asks("a", 60.0, priority=10))
    assert turns.elder(asks("b", 0.0), WORKERS) == ""
    assert turns.elder(asks("b", 0.0, priority=10), WORKERS) == "a"


def test_other_schedulers_queues_count_as_long_as_they_are_told(turns: RouterTurns, clock: Clock) -> None:
    """All that decides a turn comes along: age, class, and the workers that would do."""
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
    assert turns.elder(replace(mine, waited_s=5.0), WORKERS) == ""  # 5.5 s by now, within the tolerance
    assert turns.elder(replace(mine, router_id="a"), WORKERS) == ""
    assert not turns.told().heads  # what others told is not told again
    elsewhere.placed(asks("a"))
    turns.hear([elsewhere.told()])
    assert turns.elder(mine, WORKERS) == ""


def test_a_scheduler_that_tells_no_more_is_not_waited_for(turns: RouterTurns, clock: Clock) -> None:
    elsewhere = RouterTurns(clock)
    elsewhere.refused(asks("a", 5.0))
    turns.hear([elsewhere.told()])
    clock.now += HEARD_S + 0.1
    assert turns.elder(asks("b"), WORKERS) == ""


async def test_schedulers_hear_of_each_others_waiting_requests_over_their_store(
    store: Store, clock: Clock
) -> None:
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
