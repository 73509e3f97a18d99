"""Chosen draft lengths are compared with the best fixed one, in simulated engines."""

import random
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.services.decode.draft_length_choice import DraftLengthChooser, DraftStep
from tests.services.decode.world import World

LIMIT = 5
GOOD, MTP, MIDDLING, POOR, NONE = (
    [0.9] * LIMIT,
    [0.92, 0.85, 0.8, 0.75, 0.6],  # the demo model's in chats
    [0.7, 0.6, 0.5, 0.4, 0.4],
    [0.3, 0.2, 0.1, 0.1, 0.1],
    [0.0] * LIMIT,
)
CHEAP = {}  # model passes and verification are cheap, so long drafts are best
DEAR = {"token": 6e-4, "pass_request": 2e-5}  # verification is expensive
RAGGED = {"matching": True, "found": 0.4}  # n-grams, with a draft in four of ten rows
KINDS = {"cheap": CHEAP, "dear": DEAR, "cheap, ragged": CHEAP | RAGGED, "dear, ragged": DEAR | RAGGED}
SEEDS = 2


def chooser(kind):
    return DraftLengthChooser(LIMIT, model_tokens=0 if kind.get("matching") else None)


@pytest.mark.parametrize("acceptance", [GOOD, MIDDLING, POOR, NONE], ids=["good", "middling", "poor", "none"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_choices_are_close_to_the_best_fixed_length(kind, acceptance):
    losses = {}
    for seed in range(SEEDS):
        one, world = chooser(kind), World(acceptance, seed=seed, **kind)
        for number, requests in enumerate((1, 4, 16, 1, 16)):
            world.run(one, requests, 100)
            losses.setdefault((number, requests), []).append(world.regret(one, requests, 500))
    assert {when: round(statistics.mean(found), 3) for when, found in losses.items()} == {
        when: pytest.approx(0.0, abs=0.05) for when in losses
    }


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_choices_are_good_with_noisy_and_drifting_step_times(kind, requests):
    """Costs are not linear, steps scatter, and the machine's pace drifts: 11 of 12 runs lose little."""
    losses = []
    for seed in range(12):
        one, world = chooser(kind), World(MTP, seed=seed, noise=0.1, jump=0.06, drift=0.08, **kind)
        world.run(one, requests, 500)
        losses.append(world.regret(one, requests, 500))
    assert sorted(losses)[-2] < 0.05
    assert statistics.mean(losses) < 0.02


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_nothing_is_drafted_if_nothing_is_accepted(kind, requests):
    one, world = chooser(kind), World(NONE, **kind)
    world.run(one, requests, 150)
    del world.limits[:]
    world.run(one, requests, 1000)
    assert world.limits.count(0) > 500  # probing is almost free without a draft model
    assert world.regret(one, requests, 1000) < 0.05
    assert set(world.limits) != {0}, "it never probes again"


def test_choices_follow_the_load():
    one, world = DraftLengthChooser(LIMIT), World(GOOD, **DEAR)
    assert world.best(1) > world.best(16) + 1
    for _ in range(3):
        for requests in (1, 16):
            world.run(one, requests, 100)
            del world.limits[:]
            world.run(one, requests, 200)
            assert abs(statistics.median(world.limits) - world.best(requests)) <= 1


def test_choices_follow_the_text():
    one, world = DraftLengthChooser(LIMIT), World(POOR)
    world.run(one, 1, 500)
    assert world.limits[-100:].count(0) > 50
    world.acceptance = GOOD
    world.run(one, 1, 400)
    assert statistics.median(world.limits[-100:]) >= 3
    world.acceptance = POOR
    world.run(one, 1, 600)
    assert world.regret(one, 1, 200) < 0.06


def test_a_machine_that_slows_down_changes_nothing():
    losses = []
    for seed in range(SEEDS):
        one, world = DraftLengthChooser(LIMIT), World(MIDDLING, seed=seed)
        world.run(one, 4, 300)
        for world.slow in (2.0, 1.0, 1.3, 1.0, 3.0):
            losses.append(world.regret(one, 4, 200))
    assert statistics.mean(losses) < 0.05


def test_pauses_of_the_garbage_collector_are_ignored():
    one, world = DraftLengthChooser(LIMIT), World(MIDDLING, hiccups=0.02)
    world.run(one, 4, 200)
    assert world.regret(one, 4, 1000) < 0.05


@pytest.mark.parametrize("compiles", [0.3, 5.0])
@pytest.mark.parametrize("acceptance", [MIDDLING, POOR], ids=["middling", "poor"])
def test_steps_that_wait_for_a_compiler_are_ignored(acceptance, compiles):
    """As on a GPU, where the first use of a kernel takes seconds and launches dominate steps."""
    losses = []
    for seed in range(8):
        one = DraftLengthChooser(LIMIT)
        world = World(acceptance, seed=seed, fixed=25e-3, one_pass=3e-3, compiles=compiles)
        world.run(one, 1, 50)
        losses.append(world.regret(one, 1, 400))
    assert statistics.mean(losses) < 0.04
    assert sorted(losses)[-2] < 0.06


def test_a_hybrid_whose_model_drafts_only_the_first_token():
    """Further tokens are matched and cost only verification."""
    one = DraftLengthChooser(LIMIT, model_tokens=1)
    step = {"requests": 1, "rows": 1, "drafted": [1] * LIMIT, "accepted": [1, 1, 1, 1, 0]}
    for number in range(400):
        limit = one.choose(1)
        seconds = 2e-3 + 1e-3 * (limit > 0) + 1e-5 * limit
        tokens = 1 + limit if number else 1
        one.observe(DraftStep(tokens=tokens, limit=limit, seconds=seconds, asked=limit, **step))
    assert one._times.seconds(1, 6.0, 5) == pytest.approx(3.05e-3, rel=0.1)
    assert one._times.seconds(1, 1.0, 0) == pytest.approx(2e-3, rel=0.3)


def test_a_step_costs_microseconds():
    one, world = DraftLengthChooser(LIMIT), World(MIDDLING)
    world.run(one, 16, 100)
    step = DraftStep(16, 64, 3, 0.01, 16, 3, [16] * LIMIT, [12, 8, 4, 2, 1])
    took = []
    for _ in range(20):
        began = time.thread_time()
        for _ in range(100):
            one.choose(16)
            one.observe(step)
        took.append((time.thread_time() - began) / 100)
    assert min(took) < 60e-6  # 10 us alone on a core


def test_a_limit_of_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        DraftLengthChooser(0)


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(1, 8),
    model_tokens=st.none() | st.integers(0, 8),
    seed=st.integers(0, 2**16),
    loads=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    slow=st.floats(1e-9, 1e3),
)
def test_choices_are_in_bounds_for_any_measurements(limit, model_tokens, seed, loads, slow):
    draw, one = random.Random(seed), DraftLengthChooser(limit, model_tokens=model_tokens)
    asked = 0
    for requests in loads:
        for _ in range(30):
            chosen = one.choose(requests)
            assert 0 <= chosen <= limit
            rows = draw.randint(0, requests)
            drafted = sorted((draw.randint(0, rows) for _ in range(limit)), reverse=True)
            accepted = [draw.randint(0, count) for count in drafted]
            seconds = draw.choice([None, 0.0, slow * draw.random(), slow])
            tokens = requests + sum(drafted[:asked])
            one.observe(DraftStep(requests, tokens, chosen, seconds, rows, asked, drafted, accepted))
            asked = chosen
