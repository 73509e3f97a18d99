"""Our proposers in vLLM's model runner: the same output as without, more of it in a step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.services.decode.proposers import registry
from baton.services.speculation import SpeculativeSettings
from harness.engines import Engine, EngineProcess, Options
from harness.support import eventually
from tests.services.decode.heads import model_and_head

pytestmark = pytest.mark.timeout(900)  # the first test waits for three engines

ANSWER = 48  # tokens
LIMIT = 4


@dataclass
class Tally:
    """Counts of what the scheduler verified."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    widths: set[int] = field(default_factory=set)  # drafts of one request in one step


def prompts() -> dict[str, list[int]]:
    """Repetitive and random ones; the longest is prefilled in three steps."""
    rng = random.Random(5)
    phrase = [rng.randrange(10, 500) for _ in range(12)]
    texts = {f"random-{size}": [rng.randrange(10, 500) for _ in range(size)] for size in (3, 40, 300)}
    return texts | {"repeats": phrase * 6, "short": phrase[:4] * 3, "long": (phrase * 30)[:350]}


TALLY = Tally()  # in the engine's process: of its engine


def observe(engine: Engine, cycle: int | None) -> None:
    """Count what is verified from now on, and hand drafts to the scheduler, as vLLM's own loop does.

    cycle: the number of drafts goes through 0..cycle from step to step, as an adaptive length does.
    """
    scheduler: Any = engine.core.scheduler
    update, schedule, step = scheduler.update_from_output, scheduler.schedule, engine.step

    def count(scheduled: Any, output: Any) -> Any:
        TALLY.steps += 1
        for request, drafts in scheduled.scheduled_spec_decode_tokens.items():
            written = output.sampled_token_ids[output.req_id_to_index[request]]
            TALLY.widths.add(len(drafts))
            TALLY.drafted += len(drafts)
            TALLY.accepted += len(written) - 1
        return update(scheduled, output)

    def vary(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        if cycle is not None:
            scheduled.num_spec_tokens_to_schedule = TALLY.steps % (cycle + 1)
        return scheduled

    def draft_too() -> bool:
        going = step()
        engine.core.post_step(going)
        return going

    scheduler.update_from_output, scheduler.schedule = count, vary
    engine.step = draft_too  # type: ignore[method-assign]


def ask(engine: Engine, turn: int) -> None:
    """All prompts, which arrive while others are being decoded."""
    for name, prompt in prompts().items():
        engine.add(f"{name}-{turn}", prompt, ANSWER)
        for _ in range(3):
            engine.step()


def go_on(engine: Engine) -> bool:
    """Some steps: as many as a busy machine does within the time of a call. False: all is done."""
    return all(engine.step() for _ in range(20))


def result(engine: Engine) -> tuple[dict[str, list[int]], Tally]:
    return {name: answer.tokens for name, answer in engine.answers.items()}, TALLY


def ask_twice(options: Options, cycle: int | None = None) -> tuple[dict[str, list[int]], Tally]:
    """The second time, the first outputs are past outputs."""
    with EngineProcess(options) as engine:
        engine.call(observe, cycle)
        for turn in range(2):
            engine.call(ask, turn)
            eventually(lambda: not engine.call(go_on), 120, "all is done", every_s=0)
        return engine.call(result)


@dataclass(frozen=True)
class Setup:
    model: Path
    head: Path
    plain: dict[str, list[int]]

    def run(self, cycle: int | None = None, **spec: Any) -> tuple[dict[str, list[int]], Tally]:
        settings = SpeculativeSettings(**{"num_speculative_tokens": LIMIT, **spec})
        config = registry.method(settings.method).engine_config(settings)
        ours = {"speculative": settings.model_dump()}
        options = {"dtype": "float32", "speculative_config": config, "additional_config": {"baton": ours}}
        return ask_twice(Options(self.model, "worker", cores="1", engine=options), cycle)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    model, head = model_and_head(tmp_path_factory.mktemp("speculation"))
    plain, tally = ask_twice(Options(model, "plain", cores="1", engine={"dtype": "float32"}))
    assert tally.drafted == 0
    return Setup(model, head, plain)


@pytest.fixture(scope="module")
def alone(setup: Setup) -> Tally:
    """The draft model for one token, as the hybrid has it, without a continuation."""
    answered, tally = setup.run(method="eagle", model=str(setup.head), num_speculative_tokens=1)
    assert answered == setup.plain
    return tally


@pytest.mark.parametrize("strategy", ["with_ngram", "with_suffix"])
@pytest.mark.parametrize("cycle", [None, LIMIT])
def test_a_hybrid_outputs_the_same_in_fewer_steps(
    setup: Setup, alone: Tally, strategy: str, cycle: int | None
) -> None:
    answered, tally = setup.run(
        cycle, method="eagle", model=str(setup.head), mtp_strategy=strategy, num_model_steps=1
    )
    assert answered == setup.plain
    assert tally.widths <= set(range(1, LIMIT + 1))
    assert len(tally.widths) > 1  # ragged: what is not matched is not verified
    if cycle is None:
        assert tally.accepted > alone.accepted
        assert tally.steps < alone.steps


@pytest.mark.parametrize("cycle", [None, LIMIT])
def test_suffixes_alone(setup: Setup, cycle: int | None) -> None:
    answered, tally = setup.run(cycle, method="suffix")
    assert answered == setup.plain
    assert tally.accepted > 0
