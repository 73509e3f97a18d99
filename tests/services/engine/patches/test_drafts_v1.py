"""Our proposers in vLLM's model runner V1: the same output as without drafts, in fewer steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.engines import Engine, EngineProcess
from tests.services.decode.heads import model_and_head
from tests.services.engine.patches import drafting
from tests.services.engine.patches.drafting import COUNTS, LIMIT, Tally, answered, observe, take_tally

pytestmark = pytest.mark.timeout(900)  # the first test waits for three engines

ANSWER = 48  # tokens


def prompts() -> list[list[int]]:
    """Return random and repetitive prompts; the longest is prefilled in three steps."""
    draw = random.Random(5)
    phrase = [draw.randrange(10, 500) for _ in range(12)]
    texts = [[draw.randrange(10, 500) for _ in range(size)] for size in (3, 40, 300)]
    return [*texts, phrase * 6, phrase[:4] * 3, (phrase * 30)[:350]]


def vary(engine: Engine) -> None:
    """In the engine's process: draft one token more in each step, from 0 to LIMIT, then from 0 again."""
    scheduler: Any = engine.core.scheduler
    schedule = scheduler.schedule

    def varied(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        scheduled.num_spec_tokens_to_schedule = COUNTS[0].steps % (LIMIT + 1)
        return scheduled

    scheduler.schedule = varied


def ask_twice(engine: EngineProcess, name: str) -> tuple[list[list[int]], Tally]:
    """Ask all prompts twice; the second time, the first outputs are past outputs."""
    outputs = [answered(engine, f"{name}-{turn}", prompts(), ANSWER) for turn in range(2)]
    return [*outputs[0], *outputs[1]], engine.call(take_tally)


@dataclass(frozen=True)
class Setup:
    model: Path
    head: Path
    plain: list[list[int]]

    def run(self, **spec: Any) -> tuple[Tally, Tally]:
        """Compare the outputs with plain ones; return the counts of the usual and of varied draft lengths."""
        with EngineProcess(drafting.speculating(self.model, **spec)) as engine:
            engine.call(observe)
            usual = self.compare(engine, "usual")
            engine.call(vary)
            return usual, self.compare(engine, "varied")

    def compare(self, engine: EngineProcess, name: str) -> Tally:
        found, tally = ask_twice(engine, name)
        assert found == self.plain
        return tally


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    model, head = model_and_head(tmp_path_factory.mktemp("speculation"))
    with EngineProcess(drafting.plain(model)) as engine:
        engine.call(observe)
        plain, tally = ask_twice(engine, "plain")
    assert tally.drafted == 0
    return Setup(model, head, plain)


@pytest.fixture(scope="module")
def alone(setup: Setup) -> Tally:
    """The hybrid's draft model, for one token, without continuations."""
    spec = {"method": "eagle", "model": str(setup.head), "num_speculative_tokens": 1}
    with EngineProcess(drafting.speculating(setup.model, **spec)) as engine:
        engine.call(observe)
        return setup.compare(engine, "alone")


@pytest.mark.parametrize("strategy", ["with_ngram", "with_suffix"])
def test_a_hybrid_outputs_the_same_in_fewer_steps(setup: Setup, alone: Tally, strategy: str) -> None:
    usual, varied = setup.run(method="eagle", model=str(setup.head), mtp_strategy=strategy, num_model_steps=1)
    for tally in (usual, varied):
        assert tally.widths <= set(range(1, LIMIT + 1))
        assert len(tally.widths) > 1  # only what is matched is verified
    assert usual.accepted > alone.accepted
    assert usual.steps < alone.steps


def test_suffixes_alone(setup: Setup) -> None:
    for tally in setup.run(method="suffix"):
        assert tally.accepted > 0
