"""A worker's log and the scheduler's ledger, with messages that are lost, duplicated and late."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import block_log as log_module
from baton.block_log import BlockLog, BlockLogs, Change
from baton.prefix_keys import REMOVED
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.prefixes.index import PrefixIndex, slots_of
from baton.scheduler.prefixes.prefix_ledger import SILENT_S, PrefixLedger
from harness.scheduling import Clock

PLENTY = 1 << 20


def a_log(start=1):
    numbers = itertools.count(start)
    return BlockLog(lambda: next(numbers))


def a_ledger(clock=None):
    return PrefixLedger(PrefixIndex(PLENTY), clock or Clock())


def held(ledger, worker_id, keys=range(64)):
    slot = ledger.slot(worker_id)
    if slot is None:
        return set()
    return {key for key in keys if ledger.index.holders(key) >> slot & 1}


def deliver(ledger, log, worker_id="w"):
    """Send until the scheduler has everything."""
    for _ in range(100):
        message = log.message()
        log.heard(ledger.hear(worker_id, message))
        if not log.message().operations:
            return
    raise AssertionError("it does not end")


def test_a_block_may_be_known_before_its_worker_reports_it():
    log, ledger = a_log(), a_ledger()
    ledger.note("w", 1)  # it does not report
    deliver(ledger, log)
    ledger.note("w", 2)
    ledger.note("w", 3 | REMOVED)  # no key
    assert held(ledger, "w") == {2}
    log.take(Change(stored=[2, 3]))
    deliver(ledger, log)
    assert held(ledger, "w") == {2, 3}
    log.take(Change(removed=[2]))
    deliver(ledger, log)
    assert held(ledger, "w") == {3}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 4), st.integers(2, 12))
def test_the_ledger_catches_up_after_any_loss(seed, piece, most):
    """Lost, duplicate and late messages, cleared caches, overflowing logs, new schedulers."""
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "PIECE", piece)
        patch.setattr(log_module, "MOST", most)
        log, ledger, cache = a_log(), a_ledger(), set[int]()
        sent = []
        for _ in range(60):
            what = draw.random()
            if what < 0.4:
                stored = {draw.randrange(64) for _ in range(draw.randrange(6))}
                removed = {draw.randrange(64) for _ in range(draw.randrange(4))} - stored
                cleared = draw.random() < 0.1
                cache = ((set() if cleared else cache) - removed) | stored
                log.take(Change(cleared, sorted(removed), sorted(stored)))
            elif what < 0.9:
                message = log.message()
                sent.append(message.SerializeToString())
                if draw.random() < 0.7:
                    reply = ledger.hear("w", message)
                    if draw.random() < 0.7:
                        log.heard(reply)
                if draw.random() < 0.3:
                    ledger.hear("w", pb.BlockOperations.FromString(draw.choice(sent)))
            elif what < 0.95:
                ledger = a_ledger()
        deliver(ledger, log)
        assert held(ledger, "w") == cache
        assert len(log) == len(cache)


def test_a_gap_changes_nothing_and_is_reported():
    log, ledger = a_log(), a_ledger()
    log.take(Change(stored=[1, 2, 3]))
    deliver(ledger, log)
    lost = pb.BlockOperations()
    lost.CopyFrom(log.message())
    ahead = pb.BlockOperations(instance=lost.instance, first=lost.first + 5, operations=[7])
    known = ledger.hear("w", ahead)
    assert (known.operations, held(ledger, "w"), ledger.gaps) == (3, {1, 2, 3}, 1)


def test_a_restarted_worker_with_the_same_id_holds_nothing():
    ledger = a_ledger()
    before = a_log(1_000)
    before.take(Change(stored=range(10)))
    deliver(ledger, before)
    late = before.message()
    late.operations.append(11)
    now = a_log()  # its clock is behind
    now.take(Change(stored=[20]))
    deliver(ledger, now)
    assert held(ledger, "w") == {20}
    ledger.hear("w", late)
    assert held(ledger, "w") == {20}


def test_silent_and_dead_workers_are_forgotten():
    clock = Clock()
    ledger = a_ledger(clock)
    logs = {name: a_log() for name in ("silent", "dead", "well")}
    for name, log in logs.items():
        log.take(Change(stored=[1]))
        deliver(ledger, log, name)
    ledger.keep({"silent": 1, "well": 2})
    assert (len(ledger), "dead" in ledger) == (2, False)
    named = [[ledger.name(one) for one in slots_of(ledger.of_role(role))] for role in (1, 2, 3)]
    assert named == [["silent"], ["well"], []]
    clock.now += SILENT_S - 1
    deliver(ledger, logs["well"], "well")
    clock.now += 2
    ledger.keep({"silent": 1, "well": 2})
    assert (len(ledger), held(ledger, "well"), held(ledger, "silent")) == (1, {1}, set())
    deliver(ledger, logs["silent"], "silent")  # it reports again
    assert held(ledger, "silent") == {1}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 12))
def test_each_scheduler_gets_everything_whatever_happens_to_others(seed, most):
    """A silent or restarted scheduler neither delays the others nor resets their logs."""
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "MOST", most)
        numbers = itertools.count()
        logs, cache = BlockLogs(lambda: next(numbers)), set[int]()
        ledgers = {name: a_ledger() for name in ("a", "b", "c")}
        for _ in range(40):
            stored = {draw.randrange(64) for _ in range(draw.randrange(6))}
            removed = {draw.randrange(64) for _ in range(draw.randrange(4))} - stored
            cleared = draw.random() < 0.05
            cache = ((set() if cleared else cache) - removed) | stored
            logs.take(Change(cleared, sorted(removed), sorted(stored)))
            deliver(ledgers["a"], logs.to("a"))
            assert held(ledgers["a"], "w") == cache
            if draw.random() < 0.1:
                ledgers["b"] = a_ledger()
            if draw.random() < 0.3:
                deliver(ledgers["b"], logs.to("b"))
        for name, ledger in ledgers.items():  # "c" for the first time
            deliver(ledger, logs.to(name))
            assert held(ledger, "w") == cache
            assert not logs.to(name).message().operations
