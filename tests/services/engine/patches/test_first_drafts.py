"""Test that a decode worker verifies a handoff's drafts in its first step, without changing answers."""

import functools
import random
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager

from baton.handoff.params import load_params, save_params
from baton.services.engine.patches import first_drafts
from baton.services.engine.patches.first_drafts import MOST
from baton.services.engine.patches.replace import check
from baton.services.speculation import SpeculativeSettings
from harness.engines import BLOCK_SIZE, EngineProcess, Options, generate, pulled
from tests.handoff import checkpoints
from tests.handoff.engines import manifest_of
from tests.services.decode.heads import model_and_head

pytestmark = pytest.mark.timeout(600)  # the first test waits for an engine

LIMIT, ANSWER, LENGTH = 4, 24, 256
# Drafts fit into the prompt's last block, fill it, or need another block; the last prompt takes two steps.
LENGTHS = [5, BLOCK_SIZE - 3, BLOCK_SIZE - 2, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE - 2, 200]


def prompts():
    draw = random.Random(11)
    return [[draw.randrange(10, 500) for _ in range(length)] for length in LENGTHS]


# The following functions run in the engine's process.


@dataclass
class Seen:
    """Record what the engine scheduled, and the results."""

    first: dict[str, list[int]] = field(default_factory=dict)  # drafts in each request's first step
    resumed: dict[str, int] = field(default_factory=dict)  # number of drafts when it resumed after preemption
    tokens: dict[str, int] = field(default_factory=dict)  # number of tokens from its first step
    drafted: list[int] = field(default_factory=list)  # the number of tokens to draft, by step
    made: dict[str, list[int]] = field(default_factory=dict)  # drafts for other workers


@dataclass(frozen=True)
class How:
    drafts: list[int] | None = None  # replace the drafts that were made
    length: int = LIMIT  # the current draft length
    answer: int = ANSWER
    beyond: int = 0  # the number of tokens by which the drafts come too late
    preempt: bool = False  # whether it is preempted after the first step


PLAIN = How()
SEEN = Seen()
LOOKUP = [LIMIT]  # the current draft length


class Length:
    def __getitem__(self, requests):
        return LOOKUP[0]


def install(engine):
    from baton.services.engine.patches.draft_length import WhileDecoding

    core = engine.core
    scheduler = core.scheduler
    WhileDecoding(scheduler, Length(), 0)
    seam = first_drafts.install(core, SpeculativeSettings(method="eagle", num_speculative_tokens=LIMIT))
    assert seam is not None
    schedule, step = scheduler.schedule, engine.step

    def noting(throttle_prefills=False):
        output = schedule(throttle_prefills)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        if output.num_scheduled_tokens:
            SEEN.drafted.append(output.num_spec_tokens_to_schedule)
        for one in output.scheduled_new_reqs:
            SEEN.first[one.req_id] = list(output.scheduled_spec_decode_tokens.get(one.req_id, []))
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            SEEN.resumed[name] = len(output.scheduled_spec_decode_tokens.get(name, []))
        return output

    def stepped():
        before = {name: len(answer.tokens) for name, answer in engine.answers.items()}
        going = step()
        SEEN.made |= seam.take()
        for name, answer in engine.answers.items():
            if name in SEEN.first and len(answer.tokens) > before[name]:
                SEEN.tokens.setdefault(name, len(answer.tokens) - before[name])
        return going

    scheduler.schedule = noting
    engine.step = stepped


def handed_over(engine, name, prompt, how=PLAIN):
    """Prefill, then continue as another worker would.

    Returns the answer, the first step's drafts, and the number of its tokens.
    """
    LOOKUP[0] = how.length
    read = add_prompt(engine, name, prompt)
    engine.run()
    wrote = add_rest(engine, name, prompt, read, how.answer)
    request = engine.core.scheduler.requests[name]
    if how.drafts is not None:
        first_drafts.give(request, how.drafts)
    if how.beyond:
        request.first_drafts = request.num_tokens - how.beyond, request.first_drafts[1]
    if how.preempt:
        engine.run(until=lambda: len(wrote.tokens) > 0)
        assert engine.core.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    return read.tokens + wrote.tokens, SEEN.first[name], SEEN.tokens[name]


def add_prompt(engine, name, prompt):
    read = engine.add(f"{name}-read", prompt, 1, save_params(1))
    first_drafts.want(engine.core.scheduler.requests[f"{name}-read"])
    return read


def add_rest(engine, name, prompt, read, answer=ANSWER):
    manifest = manifest_of(read)
    load = load_params(1, manifest.num_tokens, manifest, f"{name}-read")
    wrote = engine.add(name, prompt, answer, load, written=read.tokens)
    first_drafts.give(engine.core.scheduler.requests[name], SEEN.made.pop(f"{name}-read"))
    return wrote


def together(engine, name):
    """Hand all prompts over at once, while another request runs."""
    LOOKUP[0] = LIMIT
    read = [add_prompt(engine, f"{name}-{n}", one) for n, one in enumerate(prompts())]
    engine.run()
    running = engine.add(f"{name}-running", [5] * 40, 60)
    engine.run(until=lambda: len(running.tokens) > 3)
    wrote = [add_rest(engine, f"{name}-{n}", one, read[n]) for n, one in enumerate(prompts())]
    engine.run()
    assert len(running.tokens) == 60
    return [
        (one.tokens + two.tokens, SEEN.first[f"{name}-{n}"], SEEN.tokens[f"{name}-{n}"])
        for n, (one, two) in enumerate(zip(read, wrote, strict=True))
    ]


def begin_early(engine, name, prompt):
    """Load while the prompt is prefilled. Returns the same as `handed_over`."""
    LOOKUP[0] = LIMIT
    read = add_prompt(engine, name, prompt)
    engine.run(until=lambda: read.begun is not None)
    assert read.begun is not None
    load = load_params(1, len(prompt), saved_as=f"{name}-read")
    wrote = engine.add(name, prompt, ANSWER, load)
    engine.connector.begin_load(name, 1, read.begun.manifest)
    pulled(engine, name, 1)  # the prompt ends in these steps, too
    engine.resume(name, read.tokens, manifest_of(read))
    first_drafts.give(engine.core.scheduler.requests[name], SEEN.made.pop(f"{name}-read"))
    engine.step()
    assert SEEN.first.get(name), "its drafts are verified in the very next step"
    engine.run()
    return read.tokens + wrote.tokens, SEEN.first[name], SEEN.tokens[name]


def kv_layers(engine):
    return str(engine.connector.scheduler_side.facts["KV layers"])


def seen(engine):
    del engine
    return SEEN


# The following functions run in the test's process.


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Start an engine that hands KV over to itself; two workers would make no difference here."""
    model, head = model_and_head(tmp_path_factory.mktemp("first-drafts"))
    spec = {"method": "eagle", "model": str(head), "num_speculative_tokens": LIMIT}
    spec["num_speculative_tokens_per_batch_size"] = [(1, 256, LIMIT)]
    options = {
        "dtype": "float32",
        "enable_prefix_caching": False,
        "max_model_len": LENGTH,
        "speculative_config": spec,
    }
    with EngineProcess(Options(model, "both", cores="1", engine=options)) as made:
        made.call(install)
        yield made


@pytest.fixture(scope="module")
def alone(engine):
    return [engine.call(generate, f"alone-{n}", one, ANSWER) for n, one in enumerate(prompts())]


def test_a_prompts_last_step_drafts_for_the_decode_worker(engine, alone):
    assert engine.call(kv_layers).startswith(f"{checkpoints.LAYERS + 1} (")  # the drafter's comes along
    accepted = 0
    for n, prompt in enumerate(prompts()):
        answer, drafts, tokens = engine.call(handed_over, f"apart-{n}", prompt)
        assert answer == alone[n]
        assert len(drafts) == MOST
        assert drafts[: tokens - 1] == answer[1:tokens]
        accepted += tokens - 1
    assert accepted >= len(LENGTHS)  # each handoff brings two drafts
    engine.call(handed_over, "counted", prompts()[-1], How(answer=2))
    assert engine.call(seen).drafted[-3:-1] == [0, MOST]  # its prompt's second step, and the last one


def test_many_at_once_beside_a_running_request(engine, alone):
    found = engine.call(together, "many")
    assert [answer for answer, _, _ in found] == alone
    assert all(drafts for _, drafts, _ in found)
    assert sum(tokens for _, _, tokens in found) > 1.5 * len(found)


def test_wrong_drafts_change_nothing(engine, alone):
    for n, prompt in enumerate(prompts()[:4]):
        wrong = [(token + 1) % 500 for token in alone[n][1:4]]
        answer, drafts, tokens = engine.call(handed_over, f"wrong-{n}", prompt, How(drafts=wrong))
        assert (answer, drafts, tokens) == (alone[n], wrong, 1)


def test_right_drafts_are_accepted_up_to_the_draft_length(engine, alone):
    for n, prompt in enumerate(prompts()):
        right = alone[n][1:12]
        answer, drafts, tokens = engine.call(handed_over, f"right-{n}", prompt, How(drafts=right))
        assert (answer, drafts, tokens) == (alone[n], right[:LIMIT], LIMIT + 1)


@pytest.mark.parametrize(
    ("how", "used"),
    [
        (How(length=0), 0),  # drafting does not pay
        (How(length=1), 1),
        (How(answer=3), 1),  # the last token is the model's own
        (How(answer=2), 0),
        (How(beyond=1), 0),  # they follow a different token
    ],
)
def test_no_more_drafts_than_the_step_can_use(engine, alone, how, used):
    answer, drafts, _ = engine.call(handed_over, f"limits-{how}", prompts()[4], how)
    assert answer == alone[4][: len(answer)]
    assert len(drafts) == used


def test_no_drafts_beyond_the_models_length(engine):
    draw = random.Random(5)
    for left, used in ((1, 0), (2, 1)):  # positions after the first token's
        prompt = [draw.randrange(10, 500) for _ in range(LENGTH - 1 - left)]
        expected = engine.call(generate, f"long-alone-{left}", prompt, ANSWER)
        answer, drafts, _ = engine.call(handed_over, f"long-{left}", prompt)
        assert (answer, len(drafts)) == (expected, used)


def test_a_preempted_request_has_no_drafts(engine, alone):
    answer, drafts, _ = engine.call(handed_over, "preempted", prompts()[4], How(preempt=True))
    assert answer == alone[4]
    assert drafts
    assert engine.call(seen).resumed == {"preempted": 0}


def test_drafts_after_a_load_that_began_early(engine, alone):
    answer, drafts, _ = engine.call(begin_early, "early", prompts()[-1])
    assert answer == alone[-1]
    assert drafts


# These tests need no engine.


@dataclass
class Scheduler:
    """The parts of vLLM's scheduler that are used: 20 tokens per step, blocks for `room` lookahead tokens."""

    room: int = 8
    num_spec_tokens: int = LIMIT
    max_num_scheduled_tokens: int = 20
    max_model_len: int = 100
    asked: list[int] = field(default_factory=list)  # lookahead tokens
    requests: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.kv_cache_manager = self
        self.structured_output_manager = self
        self.scheduler_config = SimpleNamespace(max_num_batched_tokens=20)
        spec = SimpleNamespace(max_num_new_slots_for_drafting=0)
        self.vllm_config = SimpleNamespace(speculative_config=spec)

        def allocate_slots(*_, num_lookahead_tokens):
            self.asked.append(num_lookahead_tokens)
            return "blocks" if num_lookahead_tokens <= self.room else None

        vllms = check(KVCacheManager, "allocate_slots", ("self", *first_drafts.ALLOCATE_SLOTS))
        self.allocate_slots = functools.wraps(MethodType(vllms, self))(allocate_slots)

    def validate_tokens(self, request, spec_tokens):
        del request
        return [token for token in spec_tokens if token < 500]

    def _update_after_schedule(self, scheduler_output):
        pass

    def update_draft_token_ids(self, draft_token_ids):
        pass


def scheduled(scheduler, others, drafts):
    """Schedule a first step with these drafts and `others` more tokens. Return the drafts in it."""
    first_drafts.FirstDrafts(scheduler, 0)
    request = SimpleNamespace(
        request_id="one", num_tokens=11, num_computed_tokens=10, num_output_tokens=1, max_tokens=50
    )
    scheduler.requests["one"] = request
    first_drafts.give(request, drafts)
    manager = scheduler
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=LIMIT) == "blocks"
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="one")],
        num_scheduled_tokens={"one": 1, "others": others},
        total_num_scheduled_tokens=1 + others,
        scheduled_spec_decode_tokens={},
        num_spec_tokens_to_schedule=LIMIT,
    )
    scheduler._update_after_schedule(output)
    found = output.scheduled_spec_decode_tokens.get("one", [])
    assert output.num_scheduled_tokens["one"] == 1 + len(found)
    assert output.total_num_scheduled_tokens == 1 + others + len(found)
    assert not hasattr(request, "first_drafts")  # gone, whether used or not
    return found


def test_drafts_take_the_rest_of_a_steps_budget():
    assert scheduled(Scheduler(), 10, [1, 2, 3]) == [1, 2, 3]
    assert scheduled(Scheduler(), 17, [1, 2, 3]) == [1, 2]
    assert scheduled(Scheduler(), 19, [1, 2, 3]) == []


def test_drafts_that_the_grammar_forbids_are_dropped():
    assert scheduled(Scheduler(), 10, [1, 2, 501]) == [1, 2]
    assert scheduled(Scheduler(), 10, [501]) == []


def test_drafts_need_slots_in_addition_to_lookahead():
    scheduler = Scheduler()
    assert scheduled(scheduler, 10, [1, 2, 3]) == [1, 2, 3]
    assert scheduler.asked == [LIMIT + 3]


def test_a_request_does_not_wait_for_slots_of_drafts():
    scheduler = Scheduler(room=LIMIT)
    assert scheduled(scheduler, 10, [1, 2, 3]) == []
    assert scheduler.asked == [LIMIT + 3, LIMIT]
