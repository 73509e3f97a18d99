import asyncio
import threading
from contextlib import nullcontext

import pytest

from baton.services.ray import deployment, pauses
from baton.services.ray.deployment import Deployment
from baton.services.ray.pauses import MOST_S, TURN_S, Pauses


def test_failures_are_reported_and_turns_become_rarer():
    now, told = 0.0, []
    one = Pauses(lambda _, text: told.append(text), lambda: now)
    assert one.went_well() == TURN_S
    waits = []
    for _ in range(100):
        waits.append(one.failed(OSError("Ray is away")))
        now += waits[-1]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (TURN_S, MOST_S)
    assert 3 <= len(told) <= 10  # one a minute, for about eight minutes
    one.failed(ValueError("something else"))
    assert "something else" in told[-1]
    assert (one.failing_s, one.went_well()) == (now, TURN_S)
    assert "101 turns failed" in told[-1]
    assert one.failing_s == 0


@pytest.fixture
def loop(monkeypatch):
    """A deployment that only runs its loop; each turn fails."""
    made = Deployment.__new__(Deployment)
    made.scheduler_address = "127.0.0.1:1"
    made._trust, made._chosen = nullcontext(), None
    made._stopping = threading.Event()
    made._failure, made.ended, made.told, made.count = "", False, [], 0
    made._tell = lambda name, text: made.told.append((name, text))

    def turn():
        made.count += 1
        if made.count > 150:
            made._stopping.set()
        raise RuntimeError("Ray's control service is away")

    made._turn = turn
    for module in (pauses, deployment):
        monkeypatch.setattr(module, "TURN_S", 0.001)
    monkeypatch.setattr(pauses, "MOST_S", 0.001, raising=False)
    return made


def test_a_healthy_data_plane_outlives_the_loop_s_failures(loop):
    loop._ready = True
    asyncio.run(loop._run())
    assert loop.count > 150
    assert not loop.ended
    assert "control service is away" in loop.told[0][1]


def test_a_start_whose_turns_keep_failing_ends(loop, monkeypatch):
    loop._ready = False
    monkeypatch.setattr(deployment, "START_FAILS_S", 0.02)
    asyncio.run(loop._run())
    assert loop.ended
    assert "control service is away" in loop._failure
