"""A kill and a hang of workers under load, in real processes; `make chaos` runs for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.chaos.plans import PLANS
from harness.chaos.run import run

SEED = 1


@pytest.mark.timeout(400)
async def test_no_death_costs_an_answer(tmp_path: Path) -> None:
    plan = PLANS["short"]
    outcome = await run(plan, SEED, 300.0, tmp_path / plan.name, print)
    print(outcome)
    assert outcome.good, str(outcome)
    assert sum(outcome.faults.values()) == len(plan.faults)
    assert outcome.requests > plan.clients
