"""Attempts at requests, and their names."""

from __future__ import annotations

import pytest

from baton.attempts import MAX_EPOCH, Attempt, attempt_id, prefix_id


@pytest.mark.parametrize(("request_id", "epoch"), [("", 1), ("r", 0), ("r", -1), ("r", MAX_EPOCH)])
def test_an_impossible_attempt_is_not_made(request_id: str, epoch: int) -> None:
    with pytest.raises(ValueError, match=r"request_id is empty|it counts from 1"):
        Attempt(request_id, epoch)


def test_no_two_share_a_name_in_an_engine() -> None:
    requests = ["r", "r1", prefix_id("r"), prefix_id("r1")]
    named = [attempt_id(request, epoch) for request in requests for epoch in (1, 2, 11)]
    assert len(set(named)) == len(named)
