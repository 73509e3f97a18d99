"""Attempts and their bookings: the effect of each event, whether early, late or duplicated."""

from collections import OrderedDict
from dataclasses import replace

import pytest

from baton.attempts import EPOCH_KEEP_S, Attempt, image_id
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.ledger import HANDOFFS_KEPT, Ledger
from baton.scheduler.types import Booking, Reserved, RouterReport
from harness.scheduling import Clock, report
from tests.scheduler.conftest import BOOKING_LEASE_S

ONE = Attempt("r", 1)
PAIR = {"p": Reserved(100, 1, 0, 0), "d": Reserved(0, 1, 8, 0)}
READ = {"d": Reserved(0, 1, 8, 1)}


def known(request_id="r", epoch=1, *, prefilled=False, prefill="p", decode="d", blocks=8, router="router"):
    attempt = Attempt(request_id, epoch)
    return Booking(attempt, router, prefill, decode, 100, blocks, prefilled)


def tells(*placed):
    return RouterReport(placed=placed)


def booked(ledger):
    """Return the bookings, which must equal those of the only router."""
    found = {name: replace(ledger.join(name)) for name in ("p", "d", "d2", "m")}
    found = {name: one for name, one in found.items() if not one.empty}
    assert ledger.booked_by("router") == found
    return found


def test_a_pair_is_booked_and_released(ledger):
    ledger.place(known("other"))
    ledger.place(known())
    assert booked(ledger) == {"p": Reserved(200, 2, 0, 0), "d": Reserved(0, 2, 16, 0)}
    for _ in range(2):  # duplicates change nothing
        ledger.report(report(prefilled=[ONE]))
        assert booked(ledger) == {"p": PAIR["p"], "d": Reserved(0, 2, 16, 1)}
    for _ in range(2):
        ledger.report(report(finished=[ONE]))
        assert booked(ledger) == PAIR
    ledger.report(report(finished=[Attempt("other", 1)]))  # its "prefilled" never came
    assert booked(ledger) == {}
    assert not ledger.live


def test_one_worker_prefills_and_decodes(ledger):
    ledger.place(known(prefill="", decode="m"))
    assert booked(ledger) == {"m": Reserved(100, 1, 8, 0)}
    ledger.report(report(prefilled=[ONE]))
    assert booked(ledger) == {"m": Reserved(0, 1, 8, 1)}
    ledger.report(report(finished=[ONE]))
    assert booked(ledger) == {}


def test_shared_blocks_are_not_booked_twice(ledger):
    for name in ("first", "r"):
        ledger.place(known(name))
    for blocks in (3, 3, 5):  # out of 8; a later report never books more
        ledger.report(report(shared=[(ONE, blocks)]))
        assert booked(ledger)["d"] == Reserved(0, 2, 8 + 3, 0)
    ledger.report(tells(known(blocks=2)))  # reported again
    assert booked(ledger)["d"] == Reserved(0, 2, 8 + 2, 0)
    ledger.report(report(finished=[ONE], shared=[(ONE, 0)]))
    assert booked(ledger) == PAIR


def placed(what):
    return lambda ledger: ledger.report(tells(what))


def over(epoch):
    return lambda ledger: ledger.report(report(finished=[Attempt("r", epoch)]))


def expired(ledger):
    clock = ledger._clock
    assert isinstance(clock, Clock)
    clock.now += BOOKING_LEASE_S
    ledger.sweep()


LATER = known(epoch=2, decode="d2")


@pytest.mark.parametrize(
    ("first", "second", "last", "held"),
    [
        (placed(known()), placed(known(prefilled=True)), (1, False), READ),
        (placed(known()), over(1), (1, True), {}),
        (placed(known()), placed(LATER), (2, False), {"p": PAIR["p"], "d2": PAIR["d"]}),
        (placed(known()), over(2), (2, True), {}),
        (over(1), placed(LATER), (2, False), {"p": PAIR["p"], "d2": PAIR["d"]}),
        (over(2), placed(LATER), (2, True), {}),
        (over(1), over(2), (2, True), {}),
    ],
)
def test_the_later_epoch_wins_in_any_order(clock, first, second, last, held):
    for order in ((first, second), (second, first), (first, second, first)):
        ledger = Ledger(BOOKING_LEASE_S, clock)
        for event in order:
            event(ledger)
        assert ledger.last("r") == last
        assert booked(ledger) == held


def test_a_later_epoch_replaces_an_earlier_one(ledger):
    ledger.place(known())
    ledger.place(LATER)
    assert booked(ledger) == {"p": PAIR["p"], "d2": PAIR["d"]}
    result = ledger.report(
        RouterReport((known(),), (ONE,), report(finished=[ONE]).finished, (ONE,), ((ONE, 0),))
    )
    assert (result.stale, result.lost, result.fenced) == (5, [], [ONE, ONE])
    assert booked(ledger) == {"p": PAIR["p"], "d2": PAIR["d"]}
    assert ledger.last("r") == (2, False)


def test_a_finished_attempt_stays_finished(ledger):
    ledger.place(known())
    ledger.report(report(finished=[ONE]))
    result = ledger.report(RouterReport(placed=(known(),), renewed=(ONE,)))
    assert (result.stale, result.lost, result.fenced) == (0, [], [ONE, ONE])
    assert (booked(ledger), ledger.last("r")) == ({}, (1, True))


def test_an_end_before_its_booking_is_remembered(ledger):
    """The router gave up waiting for the placement, or another scheduler placed it."""
    result = ledger.report(report(finished=[ONE], renewed=[ONE]))
    assert (result.stale, result.lost, result.fenced) == (0, [], [ONE])
    assert ledger.report(tells(known())).fenced == [ONE]
    assert booked(ledger) == {}
    ledger.place(LATER)
    assert ledger.last("r") == (2, False)


def test_events_of_unknown_attempts_change_nothing(ledger):
    result = ledger.report(report(prefilled=[ONE], renewed=[ONE], shared=[(ONE, 1)]))
    assert (result.stale, result.lost, result.fenced) == (0, [ONE], [])
    assert (booked(ledger), ledger.last("r")) == ({}, (0, False))


def test_a_booking_expires_unless_it_is_renewed(ledger, clock):
    renewed = Attempt("renewed", 1)
    for name in ("r", "renewed"):
        ledger.place(known(name))
    clock.now += BOOKING_LEASE_S - 0.001
    assert not ledger.report(report(renewed=[renewed])).lost
    assert len(ledger.live) == 2
    clock.now += 0.001
    ledger.sweep()
    assert (ledger.expired, set(ledger.live)) == (1, {"renewed"})
    assert booked(ledger) == PAIR
    for _ in range(3):
        clock.now += BOOKING_LEASE_S - 0.002
        assert not ledger.report(report(renewed=[renewed])).lost
    clock.now += BOOKING_LEASE_S
    assert ledger.report(report(renewed=[renewed])).lost == [renewed]
    assert (ledger.expired, booked(ledger)) == (2, {})


def test_an_expired_attempt_may_be_booked_again(ledger):
    ledger.place(known())
    expired(ledger)
    assert ledger.last("r") == (1, False)
    result = ledger.report(report(renewed=[ONE]))
    assert (result.lost, result.fenced) == ([ONE], [])
    assert ledger.report(tells(known(prefilled=True))).fenced == []
    assert booked(ledger) == READ
    expired(ledger)
    ledger.report(report(finished=[ONE]))
    assert ledger.last("r") == (1, True)


def test_a_reported_booking_has_another_lease(ledger, clock):
    ledger.place(known())
    clock.now += BOOKING_LEASE_S - 1
    ledger.report(tells(known()))
    clock.now += BOOKING_LEASE_S - 1
    ledger.sweep()
    assert (set(ledger.live), ledger.expired) == ({"r"}, 0)


def test_each_ledger_has_another_generation():
    assert Ledger(1.0).generation != Ledger(1.0).generation


def test_history_is_newest_first_and_bounded(ledger, clock):
    names = [f"r{number}" for number in range(HANDOFFS_KEPT + 5)]
    for name in names:
        ledger.place(known(name))
        ledger.report(report(finished=[Attempt(name, 1)]))
    for name in ("earlier", "later"):
        clock.now += 1
        ledger.report(tells(known(name, prefilled=name == "later")))
    attempts, handoffs = ledger.history(100)
    assert [one.attempt.request_id for one in handoffs] == names[: -HANDOFFS_KEPT - 1 : -1]
    last = handoffs[0]
    assert (last.prefill_worker_id, last.decode_worker_id, last.outcome) == ("p", "d", "stop")
    assert (last.cost.output_tokens, last.age_s) == (7, 2.0)
    live = [(one.attempt.request_id, one.prefilled, one.lease_left_s) for one in attempts]
    assert live == [("later", True, BOOKING_LEASE_S), ("earlier", False, BOOKING_LEASE_S - 1)]
    assert [len(few) for few in ledger.history(1)] == [1, 1]


def test_images_are_not_in_the_history(ledger):
    image = image_id("r", 0)
    ledger.place(known(image))
    assert [one.attempt.request_id for one in ledger.history(1)[0]] == [image]
    ledger.report(report(finished=[Attempt(image, 1)]))
    assert ledger.history(1) == ([], [])


def test_epochs_are_remembered_for_a_while(ledger, clock):
    ledger.place(known())
    ledger.report(report(finished=[ONE]))
    clock.now += EPOCH_KEEP_S - 0.001
    ledger.sweep()
    assert ledger.last("r") == (1, True)
    ledger.place(LATER)
    for _ in range(2 * EPOCH_KEEP_S):
        clock.now += 1
        assert not ledger.report(report(renewed=[LATER.attempt])).lost
    ledger.report(report(finished=[LATER.attempt]))
    clock.now += EPOCH_KEEP_S - 0.001
    ledger.sweep()
    assert ledger.last("r") == (2, True)
    clock.now += 0.001
    ledger.sweep()
    assert ledger.last("r") == (0, False)


def test_an_updated_epoch_does_not_delay_the_expiry_of_others(ledger, clock):
    for name in ("r", "other"):
        ledger.report(report(finished=[Attempt(name, 1)]))
    clock.now += 1
    ledger.report(report(finished=[Attempt("r", 2)]))
    clock.now += EPOCH_KEEP_S - 1
    ledger.sweep()
    assert (ledger.last("r"), ledger.last("other")) == ((2, True), (0, False))


def test_superseded_attempts_leave_no_leases(ledger, clock):
    for epoch in range(1, 100):
        ledger.place(known(epoch=epoch))
    for _ in range(2):
        clock.now += BOOKING_LEASE_S - 1
        ledger.report(report(renewed=[Attempt("r", 99)]))
    assert (len(ledger.live), len(ledger._looks)) == (1, 1)


def test_finished_requests_are_forgotten(clock):
    ledger = Ledger(1.0, clock)
    kept = 100
    for number in range(20 * kept):
        clock.now += EPOCH_KEEP_S / kept
        ledger.report(RouterReport(finished=((Attempt(f"{number}", 1), pb.Finished()),)))
        assert len(ledger._past) <= kept + 1
    assert isinstance(ledger._past, OrderedDict)
    assert ledger.last(f"{number - kept - 1}") == (0, False)
    assert ledger.last(f"{number}") == (1, True)
