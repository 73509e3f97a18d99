"""A few bodies of each kind do not disturb a router's other streams; `bodies` tries thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.bodies import IDLE_EVERY, try_all
from tests.fuzz.shapes import KINDS

NUMBER = 3 * len(KINDS)


@pytest.mark.timeout(600)
def test_no_body_holds_others_up(tmp_path: Path) -> None:
    result = try_all(tmp_path, NUMBER, 3)
    assert not result.wrong, result
    assert {one.kind for one in result.outcomes} == {kind.__name__ for kind in KINDS}
    assert len(result.idle_s) == -(-NUMBER // IDLE_EVERY)
    assert any(one.status == 200 for one in result.outcomes)
    assert any(one.status == 413 for one in result.outcomes)
