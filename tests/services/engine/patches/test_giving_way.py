"""Requests of one class give way to another in vLLM's slots, KV and steps; answers stay the same."""

import functools
import random
import time
from dataclasses import dataclass, field

import pytest

from baton.handoff.params import load_params
from baton.services.decode.step_share import Standing
from harness.engines import CALL_S, EngineProcess, Options, generate, prefill
from tests.handoff.engines import manifest_of, watched
from tests.services.decode.heads import model_and_head

pytestmark = pytest.mark.timeout(600)  # the first test waits for an engine

FIRST = Standing(0, 0.25, itl_s=0.01)
BATCH = Standing(10, 0.1, preemptible=True)
SLOTS, STEP, BLOCKS = 4, 128, 56
ANSWER = 40
LATER_MS = 30_000  # requests that give way are queued as if they had come this much later
LONG_S = 0.02  # a step's time, which exceeds the goal


def prompts(count, length):
    draw = random.Random(length)
    return [[draw.randrange(10, 500) for _ in range(length)] for _ in range(count)]


# The following functions run in the engine's process. "first" is the request that goes first.


@dataclass
class Told:
    tokens: list[list[int]]
    preempted: int = 0
    held: int = 0
    beside: list[int] = field(default_factory=list)  # number of other requests in each step of "first"
    grown: list[int] = field(default_factory=list)  # tokens of the others until "first" ended, by request


GATE = []
COUNT = []  # names of all requests


def install(engine):
    from baton.services.engine.patches import early_loads
    from baton.services.engine.patches.giving_way import GivingWay

    GATE.append(GivingWay(engine.core.scheduler))
    early_loads.install(engine.core)


def add(engine, name, prompt, standing, *, later_ms=0, **how):
    engine.add(name, prompt, ANSWER, **how)
    scheduler = engine.core.scheduler
    request = scheduler.requests[name]
    scheduler.waiting.remove_request(request)
    request.standing = standing
    COUNT.append(name)
    request.priority = 2**50 + len(COUNT) + later_ms + LATER_MS * (standing is BATCH)
    scheduler.waiting.add_request(request)


def add_loading(engine, name, prompt, kept, standing, **how):
    """Add a request that loads the whole prompt's KV from this save."""
    manifest = manifest_of(kept)
    params = load_params(1, manifest.num_tokens, manifest)
    add(engine, name, prompt, standing, params=params, written=kept.tokens, **how)
    engine.answers[name].tokens += kept.tokens


def step(engine, told=None):
    outputs = []
    with watched(engine, outputs.append):
        engine.step()
    GATE[0].observe(LONG_S)
    assert len(engine.core.scheduler.running) <= SLOTS
    counts = GATE[0].take_counts()
    if told is not None:
        told.held += counts.held
        told.preempted += counts.preempted
        names = outputs[0].num_scheduled_tokens
        if "first" in names:
            told.beside.append(len(names) - 1)


def until_tokens(engine, names, count):
    deadline = time.monotonic() + CALL_S / 2
    while any(len(engine.answers[name].tokens) < count for name in names):
        assert time.monotonic() < deadline, [engine.answers[name] for name in names]
        step(engine)


def begin(engine, others, tokens, standing=BATCH, **how):
    """Add other requests, and step until the first ones have this many tokens. Return their names."""
    names = [f"batch {number}" for number in range(len(others))]
    for name, prompt in zip(names, others, strict=True):
        add(engine, name, prompt, standing, **how)
    until_tokens(engine, names[:SLOTS], tokens)
    return names


def finish(engine, names):
    """Step until all requests have ended. Return the tokens of these."""
    while engine.core.scheduler.has_requests():
        step(engine)
    return [engine.answers[name].tokens for name in names]


def scene(engine, others, first, tokens, loaded=False):
    """Let "first" arrive while others decode, or are prefilled if `tokens` is 0.

    loaded: whether the last one's KV comes from a handoff.
    """
    if loaded:
        *others, prompt = others
        add_loading(engine, "loaded", prompt, prefill(engine, "loaded", prompt), BATCH, later_ms=1_000)
        until_tokens(engine, ["loaded"], 2)
        assert engine.answers["loaded"].loaded is not None
    names = begin(engine, others, 0) + ["loaded"] * loaded
    step(engine)
    until_tokens(engine, names, tokens)
    told = Told([])
    before = [len(engine.answers[name].tokens) for name in names]
    add(engine, "first", first, FIRST)
    while engine.answers["first"].finish_reason is None:
        step(engine, told)
    told.grown = [len(engine.answers[name].tokens) - had for name, had in zip(names, before, strict=True)]
    told.tokens = finish(engine, [*names, "first"])
    return told


@dataclass
class Begun:
    tokens: list[list[int]]
    steps: int = 0  # steps without "first" after it arrived
    at_once: bool = False  # whether "first" ran in the next step after its KV arrived


def loaded_scene(engine, others, first, standing=BATCH):
    """Let "first" arrive while others decode, and load its KV."""
    kept = prefill(engine, "first", first)
    names = begin(engine, others, 2, standing, later_ms=LATER_MS)
    told = Begun([])
    add_loading(engine, "first", first, kept, FIRST)
    loaded = False
    while len(engine.answers["first"].tokens) < 2:
        before = sum(len(engine.answers[name].tokens) for name in names)
        step(engine)
        alone = sum(len(engine.answers[name].tokens) for name in names) > before
        began = len(engine.answers["first"].tokens) > 1
        told.steps += alone and not began
        told.at_once |= began and engine.answers["first"].loaded is not None and not loaded
        loaded = engine.answers["first"].loaded is not None
    told.tokens = finish(engine, [*names, "first"])
    return told


@dataclass
class Reserved:
    tokens: list[list[int]]
    preempted_before: int  # before the prompt of "first" was complete
    preempted: int  # before it decoded


def reserved_scene(engine, others, first):
    """Let "first" arrive while others decode in all slots and its prompt is computed elsewhere."""
    kept = prefill(engine, "first", first)
    names = begin(engine, others, 2)
    add(engine, "first", first, FIRST, params=load_params(1, len(first)))
    until_tokens(engine, names, 12)
    return resumed(engine, names, kept)


def resumed(engine, names, kept):
    """Complete the prompt of "first", and count how often these requests are preempted."""
    requests = [engine.core.scheduler.requests[name] for name in names]
    before = sum(one.num_preemptions for one in requests)
    engine.resume("first", kept.tokens, manifest_of(kept))
    until_tokens(engine, ["first"], 1)
    after = sum(one.num_preemptions for one in requests)
    *others, rest = finish(engine, [*names, "first"])
    return Reserved([*others, kept.tokens + rest], before, after)


def held_back_scene(engine, others, first):
    """Let "first" find a slot but no blocks to reserve, and later blocks but no slot."""
    kept = prefill(engine, "first", first)
    scheduler = engine.core.scheduler
    names = begin(engine, others[:-1], 2)
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(engine.free_blocks - 5)
    add(engine, "first", first, FIRST, params=load_params(1, len(first)))
    step(engine)
    assert scheduler.requests["first"] in scheduler.deferred_waiting
    add(engine, "batch last", others[-1], BATCH)
    until_tokens(engine, ["batch last"], 1)
    pool.free_blocks(taken)
    step(engine)
    return resumed(engine, [*names, "batch last"], kept)


# The following functions run in the test's process.


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Start an engine that drafts and has no prefix cache, so that preempted requests are recomputed."""
    model, drafter = model_and_head(tmp_path_factory.mktemp("giving-way"))
    settings = {
        "dtype": "float32",
        "scheduling_policy": "priority",
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": STEP,
        "long_prefill_token_threshold": STEP // 4,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": BLOCKS,
    }
    with EngineProcess(Options(model, "both", drafter=drafter, engine=settings)) as started:
        started.call(install)
        yield started


@functools.cache  # scenes have prompts in common
def alone(engine, prompt):
    return engine.call(generate, "alone", list(prompt), ANSWER)


def played(engine, play, others, first, *args):
    """Play a scene, and check that every request gets the same answer as alone."""
    expected = [alone(engine, tuple(prompt)) for prompt in [*others, first]]
    told = engine.call(play, others, first, *args)
    assert told.tokens == expected
    return told


@pytest.mark.parametrize("loaded", [False, True])
def test_a_preempted_request_continues_exactly(engine, loaded):
    told = played(engine, scene, prompts(SLOTS, 40), prompts(1, 100)[0], 4, loaded)
    assert told.preempted == 1
    assert told.held
    # Steps take longer than the goal, so at most one of the others takes part in a step.
    assert sorted(told.beside)[len(told.beside) // 2] <= 1
    assert all(told.grown[:-1])  # the last one lost its slot


def test_requests_that_give_way_lose_their_kv(engine):
    told = played(engine, scene, prompts(3, 450), prompts(1, 300)[0], 2)
    assert told.preempted >= 1


def test_a_prompt_in_chunks_gives_way_at_the_next_step(engine):
    told = played(engine, scene, prompts(1, 900), prompts(1, 500)[0], 0)
    assert told.preempted == 0
    assert told.held
    chunks = told.beside[: 500 // STEP]
    assert sum(chunks) <= 2  # their share is a tenth


def test_the_first_request_runs_as_soon_as_its_kv_arrives(engine):
    told = played(engine, loaded_scene, prompts(SLOTS, 40), prompts(1, 100)[0])
    assert told.at_once


def test_no_slot_is_given_twice_if_none_may_be_preempted(engine):
    lasting = BATCH._replace(preemptible=False)
    told = played(engine, loaded_scene, prompts(SLOTS + 1, 40), prompts(1, 100)[0], lasting)
    assert told.steps > 0  # each of which checked the slots


@pytest.mark.parametrize("arrives", [reserved_scene, held_back_scene])
def test_prompts_computed_elsewhere_preempt_nothing(engine, arrives):
    told = played(engine, arrives, prompts(SLOTS, 40), prompts(1, 100)[0])
    assert told.preempted_before == 0
    assert told.preempted > 0  # once its prompt is complete it takes a slot at once
