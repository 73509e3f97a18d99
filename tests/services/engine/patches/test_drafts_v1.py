"""Our proposers in vLLM's model runner V1: the same output as without drafts, in fewer steps."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.engines import EngineProcess
from tests.services.decode.heads import model_and_head
from tests.services.engine.patches import drafting
from tests.services.engine.patches.drafting import COUNTS, LIMIT, answered, observe, take_tally

pytestmark = pytest.mark.timeout(900)  # the first test waits for three engines

ANSWER = 48  # tokens


def prompts():
    """Return random and repetitive prompts; the longest is prefilled in three steps."""
    draw = random.Random(5)
    phrase = [draw.randrange(10, 500) for _ in range(12)]
    texts = [[draw.randrange(10, 500) for _ in range(size)] for size in (3, 40, 300)]
    return [*texts, phrase * 6, phrase[:4] * 3, (phrase * 30)[:350]]


def vary(engine):
    """In the engine's process: draft one token more in each step, from 0 to LIMIT, then from 0 again."""
    scheduler = engine.core.scheduler
    schedule = scheduler.schedule

    def varied(*args, **kwargs):
        scheduled = schedule(*args, **kwargs)
        scheduled.num_spec_tokens_to_schedule = COUNTS[0].steps % (LIMIT + 1)
        return scheduled

    scheduler.schedule = varied


def ask_twice(engine, name):
    """Ask all prompts twice; the second time, the first outputs are past outputs."""
    outputs = [answered(engine, f"{name}-{turn}", prompts(), ANSWER) for turn in range(2)]
    return [*outputs[0], *outputs[1]], engine.call(take_tally)


@dataclass(frozen=True)
class Setup:
    model: Path
    head: Path
    plain: list[list[int]]

    def run(self, **spec):
        """Compare the outputs with plain ones; return the counts of the usual and of varied draft lengths."""
        with EngineProcess(drafting.speculating(self.model, **spec)) as engine:
            engine.call(observe)
            usual = self.compare(engine, "usual")
            engine.call(vary)
            return usual, self.compare(engine, "varied")

    def compare(self, engine, name):
        found, tally = ask_twice(engine, name)
        assert found == self.plain
        return tally


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    model, head = model_and_head(tmp_path_factory.mktemp("speculation"))
    with EngineProcess(drafting.plain(model)) as engine:
        engine.call(observe)
        plain = answered(engine, "plain", prompts(), ANSWER)
        assert engine.call(take_tally).drafted == 0
    return Setup(model, head, plain * 2)


@pytest.fixture(scope="module")
def alone(setup):
    """The hybrid's draft model, for one token, without continuations."""
    spec = {"method": "eagle", "model": str(setup.head), "num_speculative_tokens": 1}
    with EngineProcess(drafting.speculating(setup.model, **spec)) as engine:
        engine.call(observe)
        return setup.compare(engine, "alone")


@pytest.mark.parametrize("strategy", ["with_ngram", "with_suffix"])
def test_a_hybrid_outputs_the_same_in_fewer_steps(setup, alone, strategy):
    usual, varied = setup.run(method="eagle", model=str(setup.head), mtp_strategy=strategy, num_model_steps=1)
    for tally in (usual, varied):
        assert tally.widths <= set(range(1, LIMIT + 1))
        assert len(tally.widths) > 1  # only what is matched is verified
    assert usual.accepted > alone.accepted
    assert usual.steps < alone.steps


def test_suffixes_alone(setup):
    for tally in setup.run(method="suffix"):
        assert tally.accepted > 0
