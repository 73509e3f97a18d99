import pytest

from bench import speculation_table
from bench.tables import per_draft
from harness.speculation.fleets import FLEETS
from harness.stats import saved

RESULTS = saved("speculation-table")
RAN = [
    pytest.param(cell, id=f"{name}-{fleet}")
    for name, row in RESULTS["rows"].items()
    for fleet, cell in row["cells"].items()
    if "why" not in cell
]
WITHIN = 0.05  # difference from the aggregated engine's acceptance
WITHIN_SPLIT = 0.15  # suffixes: each decode worker knows only half of the past answers


def test_every_row_was_measured_as_it_is_now():
    rows = RESULTS["rows"]
    assert set(rows) == {row.name for row in speculation_table.ROWS}
    for row in speculation_table.ROWS:
        spec = {key: value for key, value in row.spec().items() if key != "model"}
        assert (rows[row.name]["architecture"], rows[row.name]["spec"]) == (row.architecture, spec)
        assert list(rows[row.name]["cells"]) == list(FLEETS)


@pytest.mark.parametrize("cell", RAN)
def test_every_answer_is_that_of_no_speculation(cell):
    assert cell["of"] == speculation_table.PROMPTS
    assert cell["equal"] + cell["near_ties"] == cell["of"]
    assert cell["near_ties"] <= 0.1 * cell["of"]
    assert cell["accepted"] > 0


@pytest.mark.parametrize("name", list(RESULTS["rows"]))
@pytest.mark.parametrize("fleet", ["1P1D", "2P2D"])
def test_decode_workers_accept_as_many_drafts(name, fleet):
    cells = RESULTS["rows"][name]["cells"]
    split = fleet == "2P2D" and "suffix" in name
    within = WITHIN_SPLIT if split else WITHIN
    assert per_draft(cells[fleet]) == pytest.approx(per_draft(cells["aggregated"]), rel=within)
    assert cells[fleet]["handoffs"] > 0


@pytest.mark.parametrize("name", ["MTP, demo model", "EAGLE-3, demo model"])
def test_the_drafters_kv_is_worth_its_way(name):
    """Without the prompt's KV, trained heads draft worse, but answers stay the same."""
    cell = RESULTS["rows"][name]["cells"]["1P1D"]
    assert cell["withheld"]["equal"] == cell["of"]
    assert per_draft(cell["withheld"]) < per_draft(cell)
