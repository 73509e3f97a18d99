import pytest

from bench import shapes
from bench.speculation_table import PROMPTS
from harness.stats import saved

RESULTS = saved("shapes")["cases"]
CASES = {case.name: case for case in shapes.CASES}
CELLS = [
    pytest.param(name, cell, id=f"{name}-{side}")
    for name, cells in RESULTS.items()
    for side, cell in cells.items()
]


def test_every_case_is_measured():
    assert set(RESULTS) == set(CASES)


@pytest.mark.parametrize(("name", "cell"), CELLS)
def test_every_answer_is_that_of_a_plain_engine(name, cell):
    assert cell["equal"] == cell["of"] == PROMPTS
    assert cell["handoffs"] >= PROMPTS
    assert bool(cell["accepted"]) == CASES[name].drafts
    assert all(cell.get("by_worker", {}).values())  # each engine of a gang had requests
