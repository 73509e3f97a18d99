"""A worker's log of its cache. tests/scheduler/prefixes/test_ledger.py tests it with a scheduler."""

import itertools
import random

from baton import block_log
from baton.block_log import PIECE, BlockLog, BlockLogs, Change
from baton.prefix_keys import REMOVED
from baton.protos import scheduler_pb2 as pb


def taken(log):
    """Acknowledge everything in the log; return the operations."""
    found = []
    while (message := log.message()).operations:
        assert len(message.operations) <= PIECE
        found += message.operations
        heard = message.first + len(message.operations)
        log.heard(pb.BlocksKnown(instance=message.instance, operations=heard))
    return found


def test_changes_are_sent_once():
    log = BlockLog(itertools.count(1).__next__)
    log.take(Change(stored=[1, 2, 2]))
    log.take(Change(removed=[1, 7], stored=[2, 3]))
    assert taken(log) == [1, 2, 1 | REMOVED, 3]
    assert not log.message().operations
    log.take(Change(cleared=True, stored=[4]))
    assert taken(log) == [4]


def test_an_unacknowledged_log_stays_small_and_begins_again():
    draw = random.Random(1)
    names = [draw.getrandbits(60) for _ in range(4 * block_log.MOST + 1_500)]
    log, before = BlockLog(itertools.count(1).__next__), list[int]()
    log.take(Change(stored=names[:500]))
    for begin in range(500, len(names) - 1_000, 1_000):
        log.take(Change(removed=before, stored=names[begin : begin + 1_000]))
        before = names[begin : begin + 1_000]
        assert len(log._operations) <= block_log.MOST
    assert len(log) == 1_500
    assert log.behind
    assert set(taken(log)) == {*names[:500], *before}


def test_each_scheduler_has_its_own_log():
    logs = BlockLogs(itertools.count(1).__next__)
    logs.take(Change(stored=[1]))
    assert taken(logs.to("one")) == [1]
    logs.take(Change(stored=[2]))
    assert taken(logs.to("one")) == [2]
    assert sorted(taken(logs.to("other"))) == [1, 2]
