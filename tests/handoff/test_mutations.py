"""Two hundred mutations, none accepted. For more: python -m tests.handoff.mutations."""

import pytest

from tests.handoff import mutations

NUMBER = 240


@pytest.mark.timeout(120)
def test_a_wrong_handoff_is_refused_each_time():
    tally = mutations.run(NUMBER, seed=1)
    print(tally)
    assert tally.wrong == []
    assert tally.refused == tally.tried
    assert tally.tried.total() >= 200
