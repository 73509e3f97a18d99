"""Mutations of handoffs, none accepted."""

import pytest

from tests.handoff import mutations

NUMBER = 216


@pytest.mark.timeout(120)
def test_a_wrong_handoff_is_refused_each_time():
    tally = mutations.run(NUMBER, seed=1)
    assert tally.wrong == []
    assert tally.refused == tally.tried
    assert tally.tried.total() >= 180
