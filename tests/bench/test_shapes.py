import pytest

from bench import shapes
from bench.speculation_table import PROMPTS

RESULTS = shapes.load()["cases"]
CASES = {case.name: case for case in shapes.CASES}
CELLS = [
    pytest.param(name, cell, id=f"{name}-{side}")
    for name, cells in RESULTS.items()
    for side, cell in cells.items()
]


def test_the_page_shows_the_results():
    assert set(RESULTS) == set(CASES)
    assert shapes.render(shapes.load()) in shapes.PAGE.read_text(), (
        "stale: run `python -m bench shapes --page`"
    )


@pytest.mark.parametrize(("name", "cell"), CELLS)
def test_every_answer_is_that_of_a_plain_engine(name, cell):
    assert cell["equal"] == cell["of"] == PROMPTS
    assert cell["handoffs"] >= PROMPTS
    assert bool(cell["accepted"]) == CASES[name].drafts
    assert all(cell.get("by_worker", {}).values())  # each engine of a gang had requests
