"""Attempts and their ids."""

import pytest

from baton.attempts import MAX_EPOCH, Attempt, attempt_id, image_id, prefix_id


@pytest.mark.parametrize(("request_id", "epoch"), [("", 1), ("r", 0), ("r", -1), ("r", MAX_EPOCH)])
def test_invalid_attempts(request_id, epoch):
    with pytest.raises(ValueError, match=r"request_id is empty|it counts from 1"):
        Attempt(request_id, epoch)


def test_ids_in_engines_are_unique():
    requests = ["r", "r1", "r.i0", *map(prefix_id, ("r", "r1")), *(image_id("r", one) for one in (0, 1, 11))]
    named = [attempt_id(request, epoch) for request in requests for epoch in (1, 2, 11)]
    assert len(set(named)) == len(named)
