"""The ring of the last and the slowest requests."""

from __future__ import annotations

from baton.services.router.chronicle import WINDOW_S, Recent
from baton.services.router.record import Record, record_of
from baton.services.router.state import RequestState
from baton.services.router.timings import HttpTimes


def record(name: str, seconds: float = 1.0) -> Record:
    state = RequestState(name, f"f-{name}", b"", 3, 8, 64, 1e9, outcome="stop")
    state.http, state.ended, state.response_id = HttpTimes(arrived=1.0), 1.0 + seconds, f"cmpl-{name}"
    return record_of(state)


def names(records: list[Record]) -> list[str]:
    return [one.request_id for one in records]


def test_the_last_ones() -> None:
    recent = Recent(last=3)
    for number in range(5):
        recent.add(record(f"r{number}"))
    assert names(recent.last()) == ["r4", "r3", "r2"]
    assert names(recent.last(1)) == ["r4"]
    assert recent.last(0) == []


def test_the_slowest_ones_of_the_window() -> None:
    now = [0.0]
    recent = Recent(last=1, slowest=2, clock=lambda: now[0])
    recent.add(record("old", 90.0))
    for number in range(20):
        now[0] += 30.0
        recent.add(record(f"r{number}", number % 7))
    assert names(recent.slowest())[0] == "old"
    now[0] = WINDOW_S + 61
    assert "old" not in names(recent.slowest())
    assert {one.slowness_s for one in recent.slowest()} == {6.0}
    now[0] *= 3
    assert recent.slowest() == []


def test_equally_slow_ones_are_no_trouble() -> None:
    recent = Recent(slowest=2)
    for number in range(4):
        recent.add(record(f"r{number}", 5.0))
    assert len(recent.slowest()) == 2


def test_it_is_bounded() -> None:
    now = [0.0]
    recent = Recent(last=10, slowest=5, clock=lambda: now[0])
    for number in range(3000):
        now[0] += 1.0
        recent.add(record("r", number % 13))
    assert len(recent.last()) == 10
    assert len(recent.slowest()) == 5
    assert sum(len(heap) for _, heap in recent._slow) <= 5 * 16


def test_finding_one_by_either_id() -> None:
    recent = Recent(last=1)
    recent.add(record("slow", 9.0))
    recent.add(record("r"))
    for known in ("slow", "cmpl-slow"):
        found = recent.find(known)
        assert found is not None
        assert found.request_id == "slow"
    assert recent.find("nobody") is None
