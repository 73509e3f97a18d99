"""Requests of a model with states are left out of steps; their answers stay the same."""

import itertools

import pytest

from harness.architectures.registry import ARCHITECTURES
from harness.engines import EngineProcess
from tests.services.engine.patches import drafting
from tests.services.engine.patches.drafting import answered, take_tally

MODEL = ARCHITECTURES["ngram-granite4"]


def leave_out(engine):
    """In the engine's process: leave one running request out of every third step."""
    scheduler = engine.core.scheduler
    schedule, steps = scheduler.schedule, itertools.count()

    def without_one(throttle_prefills=False):
        left_out = scheduler.running[:1] if next(steps) % 3 == 0 and len(scheduler.running) > 1 else []
        del scheduler.running[: len(left_out)]
        output = schedule(throttle_prefills)
        scheduler.running += left_out
        return output

    scheduler.schedule = without_one


@pytest.mark.timeout(240)
def test_a_request_resumes_from_the_state_of_its_last_accepted_token():
    prompts = MODEL.prompts(4)
    target = MODEL.target(MODEL.checkpoint())
    with EngineProcess(drafting.speculating(target, **MODEL.spec)) as engine:
        engine.call(drafting.observe)
        expected = answered(engine, "in every step", prompts, 48)
        engine.call(take_tally)
        engine.call(leave_out)
        assert answered(engine, "left out", prompts, 48) == expected
        assert engine.call(take_tally).accepted > 0
