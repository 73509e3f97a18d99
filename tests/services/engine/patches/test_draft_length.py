"""Draft lengths that change from step to step inside vLLM, with the same output as without drafts."""

import random
import time
from types import SimpleNamespace

import pytest
import torch

from baton.services.decode.draft_length_choice import DraftLengthChooser
from baton.services.engine.patches.draft_length import DraftLengthSeam
from harness.engines import EngineProcess
from harness.support import eventually
from tests.services.decode.heads import model_and_head
from tests.services.engine.patches import drafting
from tests.services.engine.patches.drafting import COUNTS, LIMIT, answered, observe, speculating, take_tally

pytestmark = pytest.mark.timeout(600)  # the first test waits for engines

ANSWER = 64


def prompts():
    """Return prompts, some of which repeat themselves; the longest is prefilled in three steps."""
    draw = random.Random(3)
    phrase = [draw.randrange(10, 500) for _ in range(9)]
    return [phrase * 5, [draw.randrange(10, 500) for _ in range(300)], phrase[:4] * 4] + [
        [draw.randrange(10, 500) for _ in range(12)] for _ in range(5)
    ]


# The following functions run in the engine's process.


class Pattern:
    """A lookup that returns these limits in turn."""

    def __init__(self, limits):
        self._limits, self._step = limits, 0

    def __getitem__(self, requests):
        self._step += 1
        return self._limits[self._step % len(self._limits)]


def choose(engine):
    """Let DraftLengthChooser choose the lengths from now on."""
    from vllm.v1.metrics.stats import PrefixCacheStats

    scheduler = engine.core.scheduler
    scheduler.log_stats = scheduler.kv_cache_manager.log_stats = True
    scheduler.kv_cache_manager.prefix_cache_stats = PrefixCacheStats()
    seam = DraftLengthSeam(scheduler, DraftLengthChooser(LIMIT))
    step = engine.step

    def observed():
        began = time.monotonic()
        going = step()
        seam.observe(time.monotonic() - began)
        COUNTS[0].lengths[seam.choice.limit] += going
        return going

    engine.step = observed


def threads(engine):
    """Return the threads of an operator. Two threads on one core would wait for each other."""
    del engine
    return torch.get_num_threads()


def follow(engine, limits, late_steps):
    """Draft the numbers of tokens in `limits`, and defer the drafter for at most this many steps."""
    from baton.services.engine.patches import idle_drafter

    idle_drafter._STEPS = late_steps
    engine.core.scheduler.dynamic_sd_lookup = Pattern(limits)


def draft_while_decoding(engine):
    from baton.services.engine.patches.draft_length import WhileDecoding

    scheduler = engine.core.scheduler
    WhileDecoding(scheduler, scheduler.dynamic_sd_lookup, 0)


def prefill_only(engine):
    for number, prompt in enumerate(prompts()):
        engine.add(f"prefill-{number}", prompt, 1)


def count_passes(engine):
    """Count the passes of the draft model that idle_drafter does not defer."""
    drafter = engine.core.model_executor.driver_worker.worker.model_runner.drafter
    propose = drafter.propose

    def counted(**arguments):
        COUNTS[0].passes += 1
        return propose(**arguments)

    drafter.propose = counted


# The following functions run in the test's process.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return model_and_head(tmp_path_factory.mktemp("draft-length"))


@pytest.fixture(scope="module")
def plain(folders):
    with EngineProcess(drafting.plain(folders[0])) as engine:
        return answered(engine, "plain", prompts(), ANSWER)


@pytest.fixture(scope="module")
def shared_eagle(folders):
    with EngineProcess(speculating(folders[0], method="eagle", model=str(folders[1]))) as engine:
        engine.call(observe)
        engine.call(count_passes)
        yield engine


@pytest.fixture
def eagle(shared_eagle):
    shared_eagle.call(take_tally)
    return shared_eagle


@pytest.mark.parametrize("pattern", [[0] * 7 + [3, 3], [0] * 30 + [4]])
def test_a_deferred_drafter_drafts_the_same(eagle, plain, pattern):
    eagle.call(follow, pattern, 0)
    assert answered(eagle, f"{pattern} at once", prompts(), ANSWER) == plain
    at_once = eagle.call(take_tally)
    eagle.call(follow, pattern, 16)
    assert answered(eagle, f"{pattern} late", prompts(), ANSWER) == plain
    late = eagle.call(take_tally)
    assert at_once.accepted > 0
    assert (late.drafted, late.accepted) == (at_once.drafted, at_once.accepted)
    assert late.passes < 0.8 * at_once.passes


def test_steps_without_drafts_run_the_drafter_now_and_then(eagle, plain):
    eagle.call(follow, [0], 16)
    assert answered(eagle, "none", prompts(), ANSWER) == plain
    assert 0 < eagle.call(take_tally).passes < 40  # the prompts, and one in sixteen of some ninety steps


def test_a_prefill_drafts_nothing(eagle):
    """No draft length applies to a prefill. The drafter still runs over the prompts, for their KV."""
    eagle.call(follow, [LIMIT], 16)
    eagle.call(draft_while_decoding)
    eagle.call(prefill_only)
    eventually(lambda: not eagle.call(drafting.go_on), 120, "all is prefilled", every_s=0)
    found = eagle.call(take_tally)
    assert found.drafted == 0
    assert 0 < found.passes <= 2 * len(prompts())  # one per step; with drafts there would be LIMIT
    answered(eagle, "decoded", prompts(), ANSWER)
    assert eagle.call(take_tally).drafted > 0


def test_a_chosen_length_changes_no_output(eagle, plain):
    eagle.call(choose)
    for turn in range(3):
        assert answered(eagle, f"chosen {turn}", prompts(), ANSWER) == plain
    used = eagle.call(take_tally).lengths
    assert len(used) >= 3, used
    assert used.total() > 60


def test_n_grams_of_a_chosen_length(folders, plain):
    with EngineProcess(speculating(folders[0], method="ngram")) as engine:
        engine.call(observe)
        engine.call(choose)
        for turn in range(3):
            assert answered(engine, f"chosen {turn}", prompts(), ANSWER) == plain
        used = engine.call(take_tally).lengths
        assert engine.call(threads) == 1
    assert len(used) >= 3, used


class Noting:
    """A chooser that records its observations."""

    limit = 3

    def __init__(self):
        self.steps = []

    def choose(self, requests):
        """Choose 0 in the first step, then 1, 2 and 3."""
        self.chosen = getattr(self, "chosen", -requests) + 1
        return self.chosen

    def observe(self, step):
        self.steps.append(step)


def drafting_scheduler(update_from_output, ahead=0):
    return SimpleNamespace(
        dynamic_sd_lookup=[3],
        update_from_output=update_from_output,
        scheduler_config=SimpleNamespace(async_scheduling=bool(ahead)),
    )


def test_drafts_that_came_with_a_handoff_do_not_count():
    stats = SimpleNamespace(num_draft_tokens_per_pos=[2, 2, 1], num_accepted_tokens_per_pos=[2, 1, 0])
    given = SimpleNamespace(scheduler_stats=SimpleNamespace(spec_decoding_stats=stats))

    def update_from_output(scheduler_output, model_runner_output):
        model_runner_output.sampled_token_ids.clear()  # vLLM may change them in place
        return {0: given}

    scheduler, chooser = drafting_scheduler(update_from_output), Noting()
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
    assert told.seconds == 0.01  # because the step only decodes


@pytest.mark.parametrize("ahead", [0, 1], ids=["in turn", "asynchronous"])
def test_a_step_verifies_what_the_step_before_it_was_to_draft(ahead):
    scheduler = drafting_scheduler(lambda scheduler_output, model_runner_output: {}, ahead)  # noqa: ARG005
    chooser = Noting()
    seam = DraftLengthSeam(scheduler, chooser)
    flying = []
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
