"""Epochs are fenced, handoffs forgotten with their lease, memory bounded."""

from __future__ import annotations

import time

import pytest

from baton.protos import worker_pb2 as pb
from baton.protos.handoff_pb2 import Manifest
from baton.services.engine.errors import RequestRefused
from baton.services.worker import attempts
from baton.services.worker.attempts import Attempts, RunningAttempt


def attempt(name: str, epoch: int, phase: int = pb.PHASE_DECODE, session: int = 1) -> RunningAttempt:
    return RunningAttempt(name, epoch, phase, session, loads=False)  # type: ignore[arg-type]


def test_prefill_and_decode_of_one_epoch_may_both_run_here() -> None:
    table = Attempts()
    assert table.begin(attempt("a", 1, pb.PHASE_PREFILL)) is None
    table.end(table.live("a#1") or attempt("?", 0))
    assert table.begin(attempt("a", 1, pb.PHASE_DECODE)) is None
    with pytest.raises(RequestRefused) as refused:
        table.begin(attempt("a", 1, pb.PHASE_PREFILL))
    assert refused.value.code == pb.Failed.CODE_STALE


def test_a_later_epoch_replaces_a_live_one() -> None:
    table = Attempts()
    first, second = attempt("a", 1), attempt("a", 2)
    table.begin(first)
    assert table.begin(second) is first
    assert table.live("a#1") is None
    assert table.live("a#2") is second
    table.end(first)  # late
    assert table.of_request("a") is second
    assert len(table) == 1


def test_a_refused_attempt_leaves_no_trace() -> None:
    table = Attempts()
    live = attempt("a", 5)
    table.begin(live)
    with pytest.raises(RequestRefused):
        table.begin(attempt("a", 5))
    assert table.of_request("a") is live


def late(table: Attempts, name: str, epoch: int) -> bool:
    """Whether an attempt is refused; else it has begun and ended."""
    one = attempt(name, epoch)
    try:
        table.begin(one)
    except RequestRefused:
        return True
    table.end(one)
    return False


def test_what_has_ended_is_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "ENDED_LIMIT", 2)
    table = Attempts()
    assert not any(late(table, name, epoch) for name, epoch in (("a", 1), ("b", 1), ("a", 2), ("c", 1)))
    assert late(table, "a", 2)
    assert late(table, "c", 1)
    assert not late(table, "b", 1)  # it was the oldest when c came


def test_what_has_ended_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "EPOCH_KEEP_S", 0.0)
    table = Attempts()
    assert not late(table, "a", 1)
    assert not late(table, "a", 1)
    assert not table._ended
    live = attempt("b", 2)
    table.begin(live)
    assert late(table, "b", 1)  # as long as it lives it is known


def keep(table: Attempts, name: str, epoch: int = 1, lease_s: float = 60.0, session: int = 1) -> Manifest:
    one = attempt(name, epoch, pb.PHASE_PREFILL, session)
    table.begin(one)
    manifest = Manifest(request_id=one.internal_id, epoch=epoch, lease_s=lease_s)
    table.saved(one, manifest)
    table.end(one)
    return manifest


def test_what_is_still_held_is_renewed_and_what_is_gone_forgotten() -> None:
    table = Attempts()
    for name in ("pulled", "held", "replaced"):
        keep(table, name, lease_s=0.5)
    asked = table.to_renew(60.0)
    assert [one.key for one in asked] == [("pulled#1", 1), ("held#1", 1), ("replaced#1", 1)]
    table.take_saved("replaced")
    keep(table, "replaced", epoch=2)
    keep(table, "since")
    table.renewed(asked, {("held#1", 1)}, at_s=time.monotonic() + 100)
    assert [one.key for one in table.to_renew(60.0)] == [("held#1", 1), ("replaced#2", 2), ("since#1", 1)]
    held = table.take_saved("held")
    assert held is not None
    assert held.until_s > time.monotonic() + 90


def test_no_lease_is_renewed_for_ever() -> None:
    table = Attempts()
    keep(table, "its release was lost")
    assert table.to_renew(0.0) == []
    assert table.saved_epoch("its release was lost") == 1  # until its lease is over


def test_a_handoff_is_forgotten_with_its_lease() -> None:
    table = Attempts()
    for name, lease_s in (("over", 0.0), ("held", 60.0)):
        one = attempt(name, 1, pb.PHASE_PREFILL)
        table.begin(one)
        table.saved(one, Manifest(request_id=name, epoch=1, lease_s=lease_s))
        table.end(one)
    table.forget_expired()
    assert table.take_saved("over") is None
    assert table.saved_epoch("held") == 1
    assert [saved.epoch for saved in table.take_saved_of_session(1)] == [1]
    assert table.take_saved("held") is None
