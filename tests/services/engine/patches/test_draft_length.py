"""The length of drafts chosen step by step inside vLLM: the same output as without drafts."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.services.decode.draft_length_choice import DraftLength, DraftStep
from baton.services.decode.proposers import registry
from baton.services.engine.patches.draft_length import DraftLengthSeam
from baton.services.speculation import SpeculativeSettings
from harness.engines import Engine, EngineProcess, Options
from harness.support import eventually
from tests.services.decode.heads import model_and_head

pytestmark = pytest.mark.timeout(600)  # the first test waits for engines

LIMIT, ANSWER = 4, 64


def prompts() -> list[list[int]]:
    """Some of which repeat themselves; the longest is prefilled in three steps."""
    draw = random.Random(3)
    phrase = [draw.randrange(10, 500) for _ in range(9)]
    return [phrase * 5, [draw.randrange(10, 500) for _ in range(300)], phrase[:4] * 4] + [
        [draw.randrange(10, 500) for _ in range(12)] for _ in range(5)
    ]


# In the engine's process.


class Pattern:
    """A lookup that gives these limits, one a step, over and over."""

    def __init__(self, limits: list[int]) -> None:
        self._limits, self._step = limits, 0

    def __getitem__(self, requests: int) -> int:
        self._step += 1
        return self._limits[self._step % len(self._limits)]


USED: Counter[int] = Counter()
ACCEPTED: Counter[str] = Counter()


def choose(engine: Engine) -> None:
    from vllm.v1.metrics.stats import PrefixCacheStats

    scheduler: Any = engine.core.scheduler
    scheduler.log_stats = scheduler.kv_cache_manager.log_stats = True
    scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
    seam = DraftLengthSeam(scheduler, DraftLength(LIMIT))
    step = engine.step

    def observed() -> bool:
        began = time.monotonic()
        going = step()
        engine.core.post_step(going)
        seam.observe(time.monotonic() - began)
        USED[seam.choice.limit] += going
        return going

    engine.step = observed  # type: ignore[method-assign]


def threads(engine: Engine) -> int:
    """Return the threads of one operator: two on one core wait for each other at the end of each."""
    del engine
    return torch.get_num_threads()


def follow(engine: Engine, limits: list[int], late_steps: int) -> None:
    from baton.services.engine.patches import idle_drafter

    idle_drafter._STEPS = late_steps
    engine.core.scheduler.dynamic_sd_lookup = Pattern(limits)


def draft_while_decoding(engine: Engine) -> None:
    from baton.services.engine.patches.draft_length import WhileDecoding

    scheduler: Any = engine.core.scheduler
    WhileDecoding(scheduler, scheduler.dynamic_sd_lookup, 0)


def read_only(engine: Engine) -> None:
    for number, prompt in enumerate(prompts()):
        engine.add(f"read-{number}", prompt, 1)


def count_accepted(engine: Engine) -> None:
    scheduler: Any = engine.core.scheduler
    update = scheduler.update_from_output

    def counted(scheduled: Any, output: Any) -> Any:
        for request, drafts in scheduled.scheduled_spec_decode_tokens.items():
            written = output.sampled_token_ids[output.req_id_to_index[request]]
            ACCEPTED["drafted"] += len(drafts)
            ACCEPTED["accepted"] += len(written) - 1
        return update(scheduled, output)

    scheduler.update_from_output = counted


def hand_on_drafts(engine: Engine) -> None:
    """As the worker's host does after a step."""
    step = engine.step

    def stepped() -> bool:
        going = step()
        engine.core.post_step(going)
        return going

    engine.step = stepped  # type: ignore[method-assign]


def count_passes(engine: Engine) -> None:
    """Count the draft model's passes, beneath the patch that defers them."""
    drafter: Any = engine.core.model_executor.driver_worker.worker.model_runner.drafter
    propose = drafter.propose

    def counted(**arguments: Any) -> Any:
        ACCEPTED["passes"] += 1
        return propose(**arguments)

    drafter.propose = counted


def ask(engine: Engine, name: str) -> None:
    for number, prompt in enumerate(prompts()):
        engine.add(f"{name}-{number}", prompt, ANSWER)
        for _ in range(2):
            engine.step()


def go_on(engine: Engine) -> bool:
    return all(engine.step() for _ in range(20))


def answers(engine: Engine, name: str) -> list[list[int]]:
    return [engine.answers[f"{name}-{number}"].tokens for number in range(len(prompts()))]


def tally(engine: Engine) -> tuple[Counter[int], Counter[str]]:
    found = Counter(USED), Counter(ACCEPTED)
    USED.clear()
    ACCEPTED.clear()
    return found


# In the test's process.


def answered(engine: EngineProcess, name: str) -> list[list[int]]:
    engine.call(ask, name)
    eventually(lambda: not engine.call(go_on), 120, "all is done", every_s=0)
    found: list[list[int]] = engine.call(answers, name)
    return found


def speculating(target: Path, **spec: Any) -> Options:
    settings = SpeculativeSettings(**{"num_speculative_tokens": LIMIT, **spec})
    config = registry.method(settings.method).engine_config(settings)
    config["num_speculative_tokens_per_batch_size"] = [(1, 256, LIMIT)]
    ours = {"baton": {"speculative": settings.model_dump()}}
    engine: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": False, "additional_config": ours}
    return Options(target, "worker", cores="1", engine=engine | {"speculative_config": config})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return model_and_head(tmp_path_factory.mktemp("draft-length"))


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> list[list[int]]:
    with EngineProcess(Options(folders[0], "plain", cores="1", engine={"dtype": "float32"})) as engine:
        return answered(engine, "plain")


@pytest.fixture
def eagle(folders: tuple[Path, Path]) -> Iterator[EngineProcess]:
    with EngineProcess(speculating(folders[0], method="eagle", model=str(folders[1]))) as engine:
        yield engine


def test_a_chosen_length_changes_no_output(eagle: EngineProcess, plain: list[list[int]]) -> None:
    eagle.call(choose)
    for turn in range(3):
        assert answered(eagle, f"chosen {turn}") == plain
    used, _ = eagle.call(tally)
    assert len(used) >= 3, used
    assert used.total() > 60


def test_who_only_reads_drafts_nothing(eagle: EngineProcess) -> None:
    """Whatever else was chosen; the drafter still runs over the prompts, for their KV."""
    eagle.call(hand_on_drafts)
    eagle.call(count_accepted)
    eagle.call(count_passes)
    eagle.call(follow, [LIMIT], 16)
    eagle.call(draft_while_decoding)
    eagle.call(read_only)
    eventually(lambda: not eagle.call(go_on), 120, "all is read", every_s=0)
    _, found = eagle.call(tally)
    assert found["drafted"] == 0
    assert 0 < found["passes"] <= 2 * len(prompts())  # one a step: with a draft it would be LIMIT
    answered(eagle, "written")
    _, found = eagle.call(tally)
    assert found["drafted"] > 0


def test_n_grams_of_a_chosen_length(folders: tuple[Path, Path], plain: list[list[int]]) -> None:
    with EngineProcess(speculating(folders[0], method="ngram")) as engine:
        engine.call(choose)
        for turn in range(3):
            assert answered(engine, f"chosen {turn}") == plain
        used, _ = engine.call(tally)
        assert engine.call(threads) == 1
    assert len(used) >= 3, used


@pytest.mark.parametrize("pattern", [[0] * 7 + [3, 3], [0, 0, 0, 2], [0] * 30 + [4]])
def test_a_drafter_that_reads_late_drafts_the_same(
    eagle: EngineProcess, plain: list[list[int]], pattern: list[int]
) -> None:
    eagle.call(hand_on_drafts)
    eagle.call(count_accepted)
    eagle.call(count_passes)
    eagle.call(follow, pattern, 0)
    assert answered(eagle, "at once") == plain
    _, at_once = eagle.call(tally)
    eagle.call(follow, pattern, 16)
    assert answered(eagle, "late") == plain
    _, late = eagle.call(tally)
    assert at_once["accepted"] > 0
    assert (late["drafted"], late["accepted"]) == (at_once["drafted"], at_once["accepted"])
    assert late["passes"] < 0.8 * at_once["passes"]


def test_steps_without_drafts_run_the_drafter_now_and_then(
    eagle: EngineProcess, plain: list[list[int]]
) -> None:
    eagle.call(hand_on_drafts)
    eagle.call(count_passes)
    eagle.call(follow, [0], 16)
    assert answered(eagle, "none") == plain
    _, found = eagle.call(tally)
    assert 0 < found["passes"] < 40  # prompts, and each sixteenth of some ninety steps


class Noting:
    """A chooser that keeps what it is told."""

    limit = 3

    def __init__(self) -> None:
        self.steps: list[DraftStep] = []

    def choose(self, requests: int) -> int:
        """Choose 0 in the first step, then 1, 2 and 3."""
        self.chosen = getattr(self, "chosen", -requests) + 1
        return self.chosen

    def observe(self, step: DraftStep) -> None:
        self.steps.append(step)


def test_drafts_that_came_with_a_handoff_are_no_measure_of_those_made_here() -> None:
    stats = SimpleNamespace(num_draft_tokens_per_pos=[2, 2, 1], num_accepted_tokens_per_pos=[2, 1, 0])
    given = SimpleNamespace(scheduler_stats=SimpleNamespace(spec_decoding_stats=stats))

    def update_from_output(scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        model_runner_output.sampled_token_ids.clear()  # vLLM may cut them
        return {0: given}

    scheduler = SimpleNamespace(
        dynamic_sd_lookup=[3],
        update_from_output=update_from_output,
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )
    chooser: Any = Noting()
    seam = DraftLengthSeam(scheduler, chooser)
    step = SimpleNamespace(
        num_scheduled_tokens={"new": 3, "old": 4},
        total_num_scheduled_tokens=7,
        scheduled_spec_decode_tokens={"new": [5, 6], "old": [7, 8, 9]},
        scheduled_new_reqs=[SimpleNamespace(req_id="new"), SimpleNamespace(req_id="undrafted")],
        num_spec_tokens_to_schedule=3,
    )
    done = SimpleNamespace(req_id_to_index={"old": 0, "new": 1}, sampled_token_ids=[[7, 8, 1], [5, 2]])
    scheduler.update_from_output(step, done)
    seam.observe(0.01)
    [told] = chooser.steps
    assert list(told.drafted) == [1, 1, 1]
    assert list(told.accepted) == [1, 1, 0]
    assert told.seconds == 0.01  # a step of decodes alone


@pytest.mark.parametrize("ahead", [0, 1], ids=["in turn", "asynchronous"])
def test_a_step_verifies_what_the_one_before_it_was_to_draft(ahead: int) -> None:

    def update_from_output(scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        del scheduler_output, model_runner_output
        return {}

    scheduler: Any = SimpleNamespace(
        dynamic_sd_lookup=[3],
        update_from_output=update_from_output,
        scheduler_config=SimpleNamespace(async_scheduling=bool(ahead)),
    )
    chooser: Any = Noting()
    seam = DraftLengthSeam(scheduler, chooser)
    flying: list[Any] = []
    for _ in range(4):
        drafts = flying[-1].num_spec_tokens_to_schedule if flying else 0
        step = SimpleNamespace(
            num_scheduled_tokens={"one": 1 + drafts},
            total_num_scheduled_tokens=1 + drafts,
            scheduled_spec_decode_tokens={"one": [7] * drafts},
            scheduled_new_reqs=[],
            num_spec_tokens_to_schedule=scheduler.dynamic_sd_lookup[1],
        )
        flying.append(step)
        if len(flying) > ahead:
            scheduler.update_from_output(flying[-1 - ahead], None)
        seam.observe(0.01)
    told = [(one.tokens - 1, one.asked, one.limit) for one in chooser.steps]
    assert told == [(0, 0, 0), (0, 0, 1), (1, 1, 2), (2, 2, 3)][: 4 - ahead]
