"""Choosing and booking, and the order of several routers' requests when all workers are full."""

import random
from dataclasses import replace

import pytest

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.booking import Assignment
from baton.scheduler.need import Adapter
from baton.scheduler.placer import HEARD_S, TOLERANCE_S, Placer, RouterTurns, SharedTurns
from baton.scheduler.policy import NoChoice, Policy
from baton.scheduler.types import Reserved, RouterReport
from harness.scheduling import LIMITS, Options, need, register, report
from tests.scheduler.conftest import BOOKING_LEASE_S

P, D = pb.ROLE_PREFILL, pb.ROLE_DECODE
FULL, STALE = pb.Rejection.CODE_FULL, pb.Rejection.CODE_STALE_EPOCH


def made(roster, ledger, clock, limits=LIMITS):
    return Placer(roster, ledger, Policy(limits, LIMITS.policy, random.Random(1)), clock=clock)


@pytest.fixture
def placer(roster, ledger, clock):
    return made(roster, ledger, clock)


def placed(placer, what):
    outcome = placer.place(what)
    assert isinstance(outcome, Assignment), outcome
    return outcome


def refused(placer, what):
    outcome = placer.place(what)
    assert isinstance(outcome, NoChoice), outcome
    return outcome.code


def test_a_pair_is_chosen_and_booked(placer, roster, ledger):
    register(roster, "p", P)
    register(roster, "d", D)
    found = placed(placer, need(prompt=100, new=10))
    assert (found.prefill.worker_id, found.decode.worker_id) == ("p", "d")
    # 100 prompt, 4 look-ahead and 10 output tokens: 8 blocks of 16
    assert (found.booking.prompt_tokens, found.booking.blocks) == (100, 8)
    assert (found.waits, found.held) == (False, None)
    assert ledger.live["r"].booking == found.booking
    reserved = {key: one.reserved for key, one in roster.view().workers.items()}
    assert reserved == {"p": Reserved(100, 1, 0, 0), "d": Reserved(0, 1, 8, 0)}


def test_each_booking_counts_at_once(placer, roster):
    for name in ("a", "b"):
        register(roster, name)
    names = [placed(placer, need(f"r{number}", prompt=1)).decode.worker_id for number in range(8)]
    assert (names.count("a"), names.count("b")) == (4, 4)


@pytest.mark.parametrize("bound", ["prompt tokens", "requests", "blocks"])
def test_each_limit_is_exact(roster, ledger, clock, *, bound):
    """Only a worker with an empty queue takes a prompt above the limit."""
    placer = made(roster, ledger, clock, Options(idle_decode_tokens=0))
    register(roster, "p", P, max_model_len=4_096, num_blocks=1_000)
    register(roster, "d", D, max_model_len=4_096, num_blocks=100)
    if bound == "prompt tokens":
        placed(placer, need("a", prompt=600, new=0))
        assert refused(placer, need("b", prompt=401, new=0)) == FULL
        placed(placer, need("b", prompt=400, new=0))
        ledger.report(report(finished=[Attempt("a", 1), Attempt("b", 1)]))
        placed(placer, need("giant", prompt=1_500, new=0))
    elif bound == "requests":
        for number in range(8):  # twice its batch
            assert placed(placer, need(f"r{number}", prompt=1, new=1)).waits is (number >= 4)
        assert refused(placer, need("more", prompt=1, new=1)) == FULL
    else:
        placed(placer, need("long", prompt=996, new=0))  # 63 of 99 blocks
        ledger.report(report(prefilled=[Attempt("long", 1)]))
        assert refused(placer, need("more", prompt=573, new=0)) == FULL  # 37
        placed(placer, need("less", prompt=572, new=0))  # 36


def test_epochs_only_rise(placer, roster, ledger, clock):
    """This holds if the last one ended (even before its placement) or expired, or all workers are full."""
    register(roster, "m", max_num_seqs=1)
    placed(placer, need(epoch=2))
    for _ in range(2):
        outcome = placer.place(need(epoch=2))
        assert outcome == NoChoice(STALE, "epoch 2 of request r is not above 2, placed before")
    assert refused(placer, need(epoch=1)) == STALE
    placed(placer, need("other"))
    assert refused(placer, need("third")) == FULL
    assert refused(placer, need(epoch=2)) == STALE
    ledger.report(report(finished=[Attempt("r", 2), Attempt("late", 1)]))
    assert [refused(placer, need(name, 1)) for name in ("r", "late")] == [STALE, STALE]
    placed(placer, need(epoch=3))
    clock.now += BOOKING_LEASE_S
    assert refused(placer, need(epoch=3)) == STALE
    register(roster, "m", max_num_seqs=1)  # its lease has expired, too
    placed(placer, need(epoch=4))
    assert ledger.expired == 2


def test_the_oldest_request_of_all_routers_goes_first(placer, roster, ledger):
    register(roster, "m", max_num_seqs=1)
    for name in ("a", "b"):
        placed(placer, need(name))
    assert refused(placer, need("theirs", router_id="other", waited_s=5.0)) == FULL
    ledger.report(report(finished=[Attempt("a", 1)]))
    outcome = placer.place(need("mine"))
    assert outcome == NoChoice(FULL, "a request of router other goes first")
    assert ledger.last("mine") == (0, False)  # the epoch may be used again
    placed(placer, need("theirs", router_id="other", waited_s=5.0))
    ledger.report(report(finished=[Attempt("b", 1)]))
    placed(placer, need("mine"))


def test_bookings_of_other_schedulers_may_exceed_limits(placer, roster, ledger):
    """Two schedulers may use the same room. Nothing more is placed until there is room again."""
    register(roster, "m")
    for number in range(8):
        mine = placed(placer, need(f"mine{number}", prompt=1)).booking
    theirs = [replace(mine, attempt=Attempt(f"theirs{number}", 1)) for number in range(8)]
    ledger.report(RouterReport(placed=tuple(theirs)))
    assert roster.view().workers["m"].reserved.requests == 16
    ledger.report(report(finished=[Attempt(f"mine{number}", 1) for number in range(8)]))
    assert refused(placer, need("new", prompt=1)) == FULL
    ledger.report(report(finished=[theirs[0].attempt]))
    placed(placer, need("new", prompt=1))


# -- turns

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
