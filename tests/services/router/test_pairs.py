"""Pairs of workers that do not reach each other."""

from __future__ import annotations

from baton.services.router import pairs
from baton.services.router.placement import CUT_S, Pairs

PAIR, OTHER = ("p0", "d0"), ("p0", "d1")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_in_a_while_tries_a_pair_that_was_cut() -> None:
    clock = Clock()
    known = Pairs(clock)
    assert not known.avoid(PAIR)
    known.failed(PAIR)
    assert known.avoid(PAIR)
    assert not known.avoid(OTHER)
    clock.now += CUT_S
    assert [known.avoid(PAIR) for _ in range(3)] == [False, True, True]
    known.failed(PAIR)
    clock.now += CUT_S
    assert not known.avoid(PAIR)
    known.passed(PAIR)
    assert not known.avoid(PAIR)


def test_the_number_of_pairs_is_bounded() -> None:
    known = Pairs(Clock())
    for number in range(pairs.MOST + 1):
        known.failed((f"p{number}", "d0"))
    assert not known.avoid(("p0", "d0"))
    assert known.avoid((f"p{pairs.MOST}", "d0"))
