"""Requests of a model with states are left out of steps; their answers stay the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from harness.architectures.registry import ARCHITECTURES
from harness.engines import Engine, EngineProcess
from tests.services.engine.patches import drafting
from tests.services.engine.patches.drafting import answered, take_tally

MODEL = ARCHITECTURES["ngram-granite4"]


def leave_out(engine: Engine) -> None:
    """In the engine's process: leave one running request out of every third step."""
    scheduler: Any = engine.core.scheduler
    schedule, steps = scheduler.schedule, itertools.count()

    def without_one(throttle_prefills: bool = False) -> Any:
        left_out = scheduler.running[:1] if next(steps) % 3 == 0 and len(scheduler.running) > 1 else []
        del scheduler.running[: len(left_out)]
        output = schedule(throttle_prefills)
        scheduler.running += left_out
        return output

    scheduler.schedule = without_one


@pytest.mark.timeout(240)
def test_a_request_resumes_from_the_state_of_its_last_accepted_token() -> None:
    prompts = MODEL.prompts(4)
    target = MODEL.target(MODEL.checkpoint())
    with EngineProcess(drafting.speculating(target, **MODEL.spec)) as engine:
        engine.call(drafting.observe)
        expected = answered(engine, "in every step", prompts, 48)
        engine.call(take_tally)
        engine.call(leave_out)
        assert answered(engine, "left out", prompts, 48) == expected
        assert engine.call(take_tally).accepted > 0
