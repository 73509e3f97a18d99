"""Attempts of old epochs are refused, and memory is bounded."""

import pytest

from baton.protos import worker_pb2 as pb
from baton.services.engine.errors import RequestRefused
from baton.services.worker import attempts
from baton.services.worker.attempts import Attempts, RunningAttempt


def attempt(name, epoch, phase=pb.PHASE_DECODE, session=1):
    return RunningAttempt(name, epoch, phase, session)


def test_prefill_and_decode_of_one_epoch_may_run_on_one_worker():
    table = Attempts()
    assert table.begin(attempt("a", 1, pb.PHASE_PREFILL)) is None
    table.end(table.live("a#1") or attempt("?", 0))
    assert table.begin(attempt("a", 1, pb.PHASE_DECODE)) is None
    with pytest.raises(RequestRefused) as refused:
        table.begin(attempt("a", 1, pb.PHASE_PREFILL))
    assert refused.value.code == pb.Failed.CODE_STALE


def test_a_later_epoch_replaces_a_live_one():
    table = Attempts()
    first, second = attempt("a", 1), attempt("a", 2)
    table.begin(first)
    assert table.begin(second) is first
    assert table.live("a#1") is None
    assert table.live("a#2") is second
    table.end(first)  # late
    assert table.of_request("a") is second
    assert len(table) == 1


def test_a_refused_attempt_leaves_no_trace():
    table = Attempts()
    live = attempt("a", 5)
    table.begin(live)
    with pytest.raises(RequestRefused):
        table.begin(attempt("a", 5))
    assert table.of_request("a") is live


def late(table, name, epoch):
    """Begin and end an attempt; return whether it is refused instead."""
    one = attempt(name, epoch)
    try:
        table.begin(one)
    except RequestRefused:
        return True
    table.end(one)
    return False


def test_the_number_of_remembered_epochs_is_limited(monkeypatch):
    monkeypatch.setattr(attempts, "ENDED_LIMIT", 2)
    table = Attempts()
    assert not any(late(table, name, epoch) for name, epoch in (("a", 1), ("b", 1), ("a", 2), ("c", 1)))
    assert late(table, "a", 2)
    assert late(table, "c", 1)
    assert not late(table, "b", 1)  # the oldest, forgotten when c ended


def test_epochs_are_remembered_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(attempts, "EPOCH_KEEP_S", 0.0)
    table = Attempts()
    assert not late(table, "a", 1)
    assert not late(table, "a", 1)
    assert not table._ended
    live = attempt("b", 2)
    table.begin(live)
    assert late(table, "b", 1)  # it is still live
