from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from baton.handoff.load.deadlines import Deadlines

SOON_S, LATER_S = 0.05, 60.0
Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    with closing(Deadlines("test")) as made:
        yield made


def test_an_earlier_one_that_comes_later_is_called_first(
    deadlines: Deadlines, eventually: Eventually
) -> None:
    called: list[str] = []
    now = time.monotonic()
    for name, after_s in (("later", LATER_S), ("second", 2 * SOON_S), ("first", SOON_S)):
        deadlines.add(name, now + after_s, lambda name=name: called.append(name))  # type: ignore[misc]
    eventually(lambda: len(called) == 2)
    assert called == ["first", "second"]
    assert time.monotonic() >= now + 2 * SOON_S


def test_one_that_is_removed_is_not_called(deadlines: Deadlines, eventually: Eventually) -> None:
    called, other = threading.Event(), threading.Event()
    now = time.monotonic()
    deadlines.add("removed", now + SOON_S, called.set)
    deadlines.add("kept", now + 2 * SOON_S, other.set)
    deadlines.remove("removed")
    deadlines.remove("unknown")
    eventually(other.is_set)
    assert not called.is_set()


def test_one_whose_call_fails_does_not_end_the_others(
    deadlines: Deadlines, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    called = threading.Event()

    def fail() -> None:
        raise ValueError("broken on demand")

    deadlines.add("broken", time.monotonic(), fail)
    deadlines.add("kept", time.monotonic() + SOON_S, called.set)
    eventually(called.is_set)
    assert "broken on demand" in caplog.text


def test_it_closes_though_something_is_due_later() -> None:
    made = Deadlines("test")
    made.add("later", time.monotonic() + LATER_S, lambda: None)
    began = time.monotonic()
    made.close()
    made.close()
    assert time.monotonic() - began < LATER_S / 2
