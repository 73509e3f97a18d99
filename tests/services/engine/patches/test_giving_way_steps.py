"""Count the steps that requests of two classes wait in vLLM's scheduler, without an engine."""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from baton.services.decode.step_share import Standing
from baton.services.engine.patches import giving_way
from baton.services.engine.patches.early_loads import EarlyLoads
from baton.services.engine.patches.giving_way import MOST_PREEMPTIONS, GivingWay
from baton.services.prefill.prompt_share import PromptShare
from baton.services.prefill.step_length import LATELY_S
from tests.handoff import checkpoints

FIRST = Standing(0, 0.25, itl_s=0.01)
BATCH = Standing(10, 0.1, preemptible=True)
SLOTS, STEP, BLOCK, BLOCKS, LENGTH = 4, 128, 32, 56, 1024
STEPS, PER_STEP, FLOOD = 1_500, 0.03, 8
LATER = 30_000  # requests that give way are queued as if they had come this much later


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    made = EngineArgs(
        model=str(checkpoints.qwen2(tmp_path_factory.mktemp("checkpoint") / "qwen2")),
        skip_tokenizer_init=True,
        block_size=BLOCK,
        max_model_len=LENGTH,
        max_num_batched_tokens=STEP,
        max_num_seqs=SLOTS,
        scheduling_policy="priority",
        long_prefill_token_threshold=STEP // 4,
        enable_prefix_caching=False,
    ).create_engine_config()
    made.cache_config.num_gpu_blocks = BLOCKS
    return made


def output_of(ids, sampled):
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: at for at, name in enumerate(ids)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


class World:
    """A scheduler with an engine that computes nothing."""

    def __init__(self, config, seconds, kind=Scheduler, *, states=False, **gate):
        """Make a scheduler. states: whether the model also has a recurrent layer."""
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups, block = [KVCacheGroupSpec(["layer"], spec)], BLOCK
        if states:
            block = LENGTH  # vLLM sets the largest of all groups
            state = MambaSpec(block_size=block, shapes=((1,),), dtypes=(torch.float32,))
            groups.append(KVCacheGroupSpec(["state"], state))
        cache, structured = KVCacheConfig(BLOCKS, [], groups), StructuredOutputManager(config)
        self.scheduler = kind(config, cache, structured, block_size=block, hash_block_size=BLOCK)
        self.gate = GivingWay(self.scheduler, **gate)
        self.seconds = seconds  # a step's time, by its tokens
        self.now = 0  # steps so far
        self.came = {}  # the step before each request
        self.tokens = {}  # the steps in which each request got tokens
        self.asked = {}
        self.most_preemptions = 0
        self.scheduled = {}  # tokens in the last step, by request

    def add(self, standing, prompt, answer):
        name = f"{'batch' if standing is BATCH else 'first'} {len(self.came)}"
        params = SamplingParams(max_tokens=answer, ignore_eos=True)
        request = Request(name, list(range(10, 10 + prompt)), params, None)
        request.standing = standing
        request.priority = 2**50 + self.now + LATER * (standing is BATCH)
        self.scheduler.add_request(request)
        self.came[name], self.tokens[name], self.asked[name] = self.now, [], answer

    def step(self):
        self.now += 1
        scheduled = self.scheduler.schedule()
        self.scheduled = dict(scheduled.num_scheduled_tokens)
        assert len(self.scheduler.running) <= SLOTS
        ids = list(scheduled.num_scheduled_tokens)
        done = [self.scheduler.requests[name] for name in ids]
        sampled = [[7] if one.num_computed_tokens >= one.num_tokens else [] for one in done]
        self.most_preemptions = max([self.most_preemptions, *(one.num_preemptions for one in done)])
        self.scheduler.update_from_output(scheduled, output_of(ids, sampled))
        self.gate.observe(self.seconds(scheduled.total_num_scheduled_tokens))
        for name, one in zip(ids, sampled, strict=True):
            self.tokens[name] += [self.now] * len(one)


@pytest.mark.parametrize("seconds", [lambda _: 0.02, lambda tokens: 0.002 + 0.0002 * tokens])
def test_the_first_class_waits_few_steps_and_the_other_not_for_ever(config, seconds):
    """Test both steps that always exceed the goal, and steps that exceed it only when full."""
    draw, world = random.Random(5), World(config, seconds)
    while world.now < STEPS or world.scheduler.has_unfinished_requests():
        if world.now < STEPS:
            if draw.random() < PER_STEP:
                world.add(FIRST, draw.randint(20, 120), draw.randint(5, 40))
            while sum(name.startswith("batch") for name in world.scheduler.requests) < FLOOD:
                world.add(BATCH, draw.randint(40, 300), draw.randint(5, 40))
        world.step()
        assert world.now < 2 * STEPS
    assert {name: len(steps) for name, steps in world.tokens.items()} == world.asked
    first = {name: steps for name, steps in world.tokens.items() if name.startswith("first")}
    assert len(first) > 30
    waits = sorted(steps[0] - world.came[name] for name, steps in first.items())
    assert waits[-1] <= 40, waits
    assert waits[len(waits) // 2] <= 3, waits
    assert all(steps[-1] - steps[0] == len(steps) - 1 for steps in first.values())  # one in each step
    others = [steps for name, steps in world.tokens.items() if name.startswith("batch")]
    assert max(after - before for steps in others for before, after in pairwise(steps)) < 400
    assert 0 < world.most_preemptions <= MOST_PREEMPTIONS


@pytest.mark.parametrize(("ttft_s", "least", "most"), [(0.2, 32, 48), (0.0, STEP, STEP)])
def test_prompts_that_give_way_have_short_steps_while_first_requests_arrive(
    config, monkeypatch, ttft_s, least, most
):
    clock = [100.0]
    monkeypatch.setattr(giving_way, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    world = World(config, lambda tokens: 0.001 * tokens)

    def full_steps(count):
        """Run this many steps with enough prompts. Return the size of the largest of the last five."""
        found = []
        for _ in range(count):
            while len(world.scheduler.requests) < SLOTS:
                world.add(BATCH, 320, 1)
            world.step()
            found.append(sum(world.scheduled.values()))
        return max(found[-5:])

    assert full_steps(5) == STEP
    world.add(FIRST._replace(ttft_s=ttft_s), 20, 1)
    assert least <= full_steps(30) <= most
    clock[0] += LATELY_S + 1
    assert full_steps(5) == STEP


def test_prompts_of_one_step_have_their_share_of_the_time(config):
    """They begin and end before they could be left out of a step."""
    world = World(config, lambda _: 0.02)
    world.add(FIRST._replace(itl_s=0.0), 20, 300)
    with_prompts = 0
    for _ in range(250):
        while len(world.scheduler.requests) < 3:
            world.add(BATCH, 30, 1)
        world.step()
        with_prompts += any(name.startswith("batch") for name in world.scheduled)
    assert 15 <= with_prompts <= 40  # a tenth of the time


def test_a_first_class_prompt_has_its_step_alone(config):
    world = World(config, lambda _: 0.02)
    world.add(FIRST, 20, 1)
    world.add(BATCH, 320, 1)
    while world.scheduler.has_unfinished_requests():
        world.step()  # mostly without the first class, so that the other exceeds its share
    for standing in (BATCH, BATCH, FIRST):
        world.add(standing, 30, 1)
    world.step()
    assert [name.split()[0] for name in world.scheduled] == ["first"]
    world.step()
    assert [name.split()[0] for name in world.scheduled] == ["batch", "batch"]


@pytest.mark.parametrize(
    ("seconds", "share"), [(lambda _: 0.025, STEP), (lambda tokens: 1e-3 + 1e-3 * tokens, STEP // 4)]
)
def test_measured_step_times_determine_a_long_prompts_share(config, seconds, share):
    world = World(config, seconds)
    world.gate.measure_share(PromptShare(STEP // 4, STEP))
    most = 0
    try:
        for number in range(60):
            if number % 4 == 0:
                world.add(FIRST, 600 if number % 8 else 40, 6)
            world.step()
            if number > 40 and len(world.scheduled) > 1:
                most = max(most, *world.scheduled.values())
        assert config.scheduler_config.long_prefill_token_threshold == share
    finally:
        config.scheduler_config.long_prefill_token_threshold = STEP // 4
    assert most > STEP // 2 if share == STEP else most <= STEP // 2


def test_step_times_with_asynchronous_scheduling(config):
    world, seen = World(config, lambda _: 0.0, ahead=1), list[tuple[int, float]]()
    gate = world.gate
    share = SimpleNamespace(observe=lambda *told: seen.append(told), tokens=STEP // 4)
    gate.measure_share(share)
    for prompt, seconds in ((40, 0.1), (50, 0.2), (60, 0.15)):
        world.add(FIRST, prompt, 1)
        world.scheduler.schedule()
        gate.observe(seconds)
    gate.observe(0.3)  # a call that only returns results
    gate.observe(0.4)
    # The second step took longer to launch than until its results came. A prompt that is not alone gets a
    # quarter.
    assert seen == [(40, 0.2), (STEP // 4, 0.2), (50, 0.3)]


def test_a_request_in_a_running_step_loses_its_slot(config, monkeypatch):
    """With asynchronous scheduling and a KV connector its blocks cannot be freed at once."""
    world, flying = World(config, lambda _: 0.02, AsyncScheduler, ahead=1), list[Any]()
    scheduler = world.scheduler
    scheduler.defer_block_free = True
    monkeypatch.setattr(world.gate, "_is_loaded", lambda _: True)  # so that it does not count as a prompt
    for _ in range(SLOTS):
        world.add(BATCH, 8, 200)
    came = 0
    for number in range(40):
        if number == 20:
            world.add(Standing(0, 0.25), 8, 4)
        flying.append(scheduler.schedule())
        came = came or number * (f"first {SLOTS}" in flying[-1].num_scheduled_tokens)
        if len(flying) > 1:
            ended = flying.pop(0)
            ids = list(ended.num_scheduled_tokens)
            scheduler.update_from_output(ended, output_of(ids, [[7] for _ in ids]))
        world.gate.observe(0.02)
    assert 20 < came <= 24


def test_a_prompt_of_a_model_with_states_finds_room(config):
    """Its blocks are counted by group: vLLM's block size of such a model holds a whole prompt."""
    world = World(config, lambda _: 0.02, states=True)
    for _ in range(3):
        world.add(BATCH, 450, 30)
    while not all(world.tokens.values()):
        world.step()
    world.add(FIRST, 300, 1)
    world.step()
    assert "first 3" in world.scheduled
    assert world.scheduler.requests["batch 2"].num_preemptions == 1


def test_a_reservation_of_a_model_with_states_leaves_blocks_for_answers(config):
    world, unheard = World(config, lambda _: 0.02, states=True), {"first 1"}
    EarlyLoads(world.scheduler, SimpleNamespace(is_unheard=unheard.__contains__))
    world.add(FIRST, 20, 40)
    world.step()
    pool = world.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 13)
    world.add(FIRST, 352, 1)  # 11 blocks and one for the state, which leaves one for the answer
    world.step()
    assert list(world.scheduled) == ["first 0"]
    unheard.clear()
    world.step()
    assert "first 1" in world.scheduled
