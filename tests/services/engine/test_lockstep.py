"""Engines in lock-step: all take part in every forward, no work is forgotten, and all stop together."""

import queue
import random
import threading
import time

import pytest

from baton.services.engine.lockstep import Lockstep

DEADLINE_S = 30.0
INTERVAL = 4


class Gang:
    """Engines in threads. A forward is a barrier, so a gang out of step breaks it or hangs."""

    def __init__(self, size, seed):
        self.forward = threading.Barrier(size, timeout=DEADLINE_S)
        self.votes = [False] * size
        self.engines = [Member(self, rank, random.Random(f"{seed} {rank}")) for rank in range(size)]

    def agree(self, rank, busy):
        self.votes[rank] = busy
        self.forward.wait()
        result = any(self.votes)
        self.forward.wait()
        return result

    def run(self):
        for engine in self.engines:
            engine.thread.start()
        for engine in self.engines:
            engine.thread.join(DEADLINE_S)
        for engine in self.engines:
            assert engine.error is None, engine.error
            assert not engine.thread.is_alive()


class Member:
    def __init__(self, gang, rank, chance):
        self.gang, self.rank, self.chance = gang, rank, chance
        self.messages = queue.SimpleQueue()
        self.lockstep = Lockstep(self._agree, self._ring, self._forward, INTERVAL)
        self.work = 0  # steps still to compute
        self.done = 0
        self.forwards = 0
        self.ends = False
        self.error = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def add(self, steps):
        self.messages.put(lambda: setattr(self, "work", self.work + steps))

    def end(self):
        self.messages.put(lambda: setattr(self, "ends", True))

    def _agree(self, busy):
        return self.gang.agree(self.rank, busy)

    def _ring(self, wave):
        for other in self.gang.engines:
            if other is not self:
                other.messages.put(lambda lockstep=other.lockstep: lockstep.rung(wave))

    def _forward(self):
        self.forwards += 1
        self.gang.forward.wait()

    def _run(self):
        try:
            while not self.ends:
                self._turn()
            self.lockstep.finish_wave()
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            self.error = error
            self.gang.forward.abort()

    def _turn(self):
        if not self.work and not self.lockstep.running:
            self.messages.get(timeout=DEADLINE_S)()
        while not self.messages.empty():
            self.messages.get()()
        if self.work:
            self.lockstep.start()
        if not self.lockstep.running:
            return
        executed = bool(self.work) and self.chance.random() < 0.8  # now and then it waits for KV
        if executed:
            self._forward()
            self.work -= 1
            self.done += 1
        self.lockstep.finish_turn(executed=executed, busy=bool(self.work))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_random_work(size, seed):
    gang, chance = Gang(size, seed), random.Random(seed)
    given = [0] * size

    def feed():
        for _ in range(300):
            rank = chance.randrange(size)
            steps = chance.choice([1, 1, 2, 7])
            given[rank] += steps
            gang.engines[rank].add(steps)
            if chance.random() < 0.3:  # let the gang stop
                threading.Event().wait(0.002)
        deadline = time.monotonic() + DEADLINE_S
        while [engine.done for engine in gang.engines] != given and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        for engine in gang.engines:  # they may end in the middle of a wave
            engine.end()

    feeder = threading.Thread(target=feed)
    feeder.start()
    gang.run()
    feeder.join()
    assert [engine.done for engine in gang.engines] == given
    assert len({engine.forwards for engine in gang.engines}) == 1
    assert len({engine.lockstep.wave for engine in gang.engines}) == 1


def nothing(*_):
    pass


def own_work(busy):
    """Agree as a gang whose other engines have no work."""
    return busy


def test_a_ring_of_another_wave_changes_nothing():
    lockstep = Lockstep(own_work, nothing, nothing, INTERVAL)
    lockstep.rung(0)
    lockstep.finish_turn(executed=True, busy=False)
    assert (lockstep.wave, lockstep.running) == (1, False)
    lockstep.rung(0)
    assert not lockstep.running
    lockstep.rung(1)
    assert lockstep.running


def test_it_rings_once_for_a_wave():
    rung = []
    lockstep = Lockstep(own_work, rung.append, nothing, INTERVAL)
    for _ in range(INTERVAL):
        lockstep.start()
        lockstep.finish_turn(executed=True, busy=True)
    assert rung == [0]


def test_without_a_step_it_computes_a_dummy():
    computed = []
    lockstep = Lockstep(own_work, nothing, lambda: computed.append("dummy"), INTERVAL)
    lockstep.rung(0)
    lockstep.finish_turn(executed=False, busy=False)
    lockstep.rung(1)
    lockstep.finish_turn(executed=True, busy=False)
    assert computed == ["dummy"]
    assert lockstep.dummies == 1
