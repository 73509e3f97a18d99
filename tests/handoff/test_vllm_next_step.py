"""A request that waits for KV runs in the next step once everything is here."""

import random
from dataclasses import dataclass

import pytest

from baton.handoff.load.loader import State
from baton.handoff.params import load_params
from harness.engines import BLOCK_SIZE, EngineProcess, Options, generate, prefill, queue_batches
from harness.support import eventually
from tests.handoff import checkpoints
from tests.handoff.engines import loaded_of, manifest_of, rank, release, watched

WRITTEN = 8
LENGTH = 300

pytestmark = pytest.mark.timeout(240)  # an engine starts within the first test


@pytest.fixture(scope="module")
def engine(model):
    """An engine that hands over to itself."""
    settings = {"dtype": "float32", "enable_prefix_caching": False}
    with EngineProcess(Options(model, "both", engine=settings)) as started:
        started.call(install)
        yield started


def prompt_of(name):
    return random.Random(name).choices(range(2, checkpoints.VOCAB), k=LENGTH)


# Runs in the engine's process.


def install(engine):
    """Apply the worker's patch that delays reservations."""
    from baton.services.engine.patches import early_loads

    early_loads.install(engine.core)


def state(name):
    load = rank().loader._loads.get((name, 1))
    return load.state if load is not None else None


def until(condition):
    """Wait without a step."""
    eventually(condition, 15, "the load's state changes", 0.001)


def reserve(engine, name, prompt):
    engine.add(name, prompt, WRITTEN, load_params(1, len(prompt), saved_as=f"{name}-read"))


def saved(engine, name, prompt):
    kept = prefill(engine, f"{name}-read", prompt)
    return kept.tokens, manifest_of(kept)


def go_on(engine, name, prompt, depth, last):
    """Resume a request while another one runs. last: whether its KV or its token comes last.

    Returns its tokens, and whether it took part in each of the next steps.
    """
    tokens, manifest = saved(engine, name, prompt)
    queue_batches(engine, depth)
    running = engine.add(f"{name}-beside", [5] * 40, 200)
    engine.run(lambda: len(running.tokens) > 3)
    reserve(engine, name, prompt)
    engine.run(lambda: state(name) is State.RESERVED)
    if last == "token":
        engine.connector.begin_now(name, 1, manifest)
        until(lambda: state(name) is State.HELD)
        engine.resume(name, tokens, manifest)
    else:
        engine.resume(name, tokens, manifest)
        until(lambda: state(name) is None)
    seen = []
    with watched(engine, lambda output: seen.append(set(output.num_scheduled_tokens))):
        engine.run(lambda: len(seen) >= 2)
    engine.core.abort_requests([f"{name}-beside"])
    engine.run()
    queue_batches(engine, 1)
    return tokens + engine.answers[name].tokens, [name in one for one in seen[:2]]


def in_order(engine, name, prompt, order):
    """Let the messages of a handoff arrive in this order."""
    tokens, manifest = saved(engine, name, prompt)
    reserve(engine, name, prompt)
    for word in order.split(", "):
        if word == "blocks":
            engine.step()
            assert engine.core.scheduler.kv_holding_waiting
        elif word == "manifest":
            engine.connector.begin_load(name, 1, manifest)
        else:
            engine.resume(name, tokens, manifest)
    engine.run()
    answer = engine.answers[name]
    loaded_of(answer)
    return tokens + answer.tokens


def preempted(engine, name, prompt):
    tokens, manifest = saved(engine, name, prompt)
    reserve(engine, name, prompt)
    engine.step()
    engine.resume(name, tokens, manifest)
    answer = engine.answers[name]
    engine.run(lambda: len(answer.tokens) > 1)
    request = engine.core.scheduler.requests[name]
    assert engine.core.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    return tokens + answer.tokens, request.num_preemptions


def given_up(engine, name, prompt, at):
    """Abort a request; return the free blocks before and after it, and its load's problem."""
    tokens, manifest = saved(engine, name, prompt)
    before = engine.free_blocks
    reserve(engine, name, prompt)
    if at != "wished":
        engine.step()
        assert engine.free_blocks < before
    if at in ("held", "told"):
        engine.connector.begin_now(name, 1, manifest)
        until(lambda: state(name) is State.HELD)
    if at == "told":
        engine.resume(name, tokens, manifest)
    engine.core.abort_requests([name])
    if at in ("reserved", "held", "told"):
        assert engine.free_blocks < before, "blocks were freed before the ranks said that nobody writes"
    engine.run()
    loaded = engine.answers[name].loaded
    release(engine, manifest)
    assert not engine.core.scheduler.requests
    return before, engine.free_blocks, str(loaded.problem) if loaded is not None else ""


@dataclass
class Growth:
    tokens: list[int]
    beside: list[int]
    preempted: int
    reserved: bool  # before the source's first message
    behind: int = 0  # tokens of the next request in the queue by then
    lookups: int = 0  # lookups in the prefix cache by then


def is_waiting(engine, name):
    """Return whether a request waits without blocks."""
    return any(one.request_id == name for one in engine.core.scheduler.waiting)


def tight(engine, name, prompt, word):
    """Let an answer grow while few blocks are free, until the source of a waiting request sends something.

    word: its first message
    """
    tokens, manifest = saved(engine, name, prompt)
    manager = engine.core.scheduler.kv_cache_manager
    running = engine.add(f"{name}-beside", [5] * 40, 200)
    engine.run(lambda: len(running.tokens) > 3)
    request = engine.core.scheduler.requests[f"{name}-beside"]
    taken = manager.block_pool.get_new_blocks(engine.free_blocks - -(-len(prompt) // BLOCK_SIZE) - 1)
    lookups, look = list[str](), manager.get_computed_blocks

    def noting(one):
        lookups.append(one.request_id)
        return look(one)

    manager.get_computed_blocks = noting
    reserve(engine, name, prompt)
    behind = engine.add(f"{name}-behind", [7] * 20, 4)
    try:
        engine.run(lambda: len(running.tokens) > 100)
        told = Growth([], [], 0, not is_waiting(engine, name), len(behind.tokens), lookups.count(name))
        manager.block_pool.free_blocks(taken[:2])  # as many as the answer took
        if word == "begun":
            engine.connector.begin_load(name, 1, manifest)
            engine.run(lambda: not is_waiting(engine, name))
        engine.resume(name, tokens, manifest)
        engine.run(lambda: len(engine.answers[name].tokens) > 0)
    finally:
        manager.get_computed_blocks = look
        manager.block_pool.free_blocks(taken[2:])
    engine.run()
    told.tokens, told.beside = tokens + engine.answers[name].tokens, running.tokens
    told.preempted = request.num_preemptions
    return told


# Runs in the test's process.


@pytest.mark.parametrize("last", ["token", "KV"])
@pytest.mark.parametrize("depth", [1, 2])
def test_it_decodes_in_the_very_next_step(engine, depth, last):
    """With several steps in flight, it decodes in the next one that is scheduled."""
    name = f"next-{depth}-{last}"
    prompt = prompt_of(name)
    expected = engine.call(generate, f"{name}-alone", prompt, WRITTEN)
    tokens, took_part = engine.call(go_on, name, prompt, depth, last)
    assert tokens == expected
    assert took_part[0]


ORDERS = [
    "blocks, manifest, token",
    "manifest, blocks, token",
    "manifest, token, blocks",
    "blocks, token",
    "token, blocks",
    "blocks, manifest, manifest, token",
]


@pytest.mark.parametrize("order", ORDERS)
def test_the_messages_of_a_handoff_may_come_in_any_order(engine, order):
    name = order.replace(", ", "-")
    prompt = prompt_of(name)
    expected = engine.call(generate, f"{name}-alone", prompt, WRITTEN)
    assert engine.call(in_order, name, prompt, order) == expected


def test_a_preempted_request_is_recomputed(engine):
    prompt = prompt_of("preempted")
    expected = engine.call(generate, "preempted-alone", prompt, WRITTEN)
    assert engine.call(preempted, "preempted", prompt) == (expected, 1)


@pytest.mark.parametrize(
    ("at", "end"), [("wished", ""), ("reserved", "PullCancelled"), ("held", "None"), ("told", "None")]
)
def test_an_aborted_request_leaves_nothing(engine, at, end):
    before, after, problem = engine.call(given_up, f"given-up-{at}", prompt_of(at), at)
    assert before == after
    assert problem.split(":")[0] == end


@pytest.mark.parametrize("word", ["begun", "complete"])
def test_waiting_for_a_source_leaves_blocks_to_running_answers(engine, word):
    name = f"tight-{word}"
    prompt = prompt_of(name)
    expected = engine.call(generate, f"{name}-alone", prompt, WRITTEN)
    beside = engine.call(generate, f"{name}-beside-alone", [5] * 40, 200)
    told = engine.call(tight, name, prompt, word)
    assert told.tokens == expected
    assert told.beside == beside
    assert told.preempted == 0
    assert not told.reserved
    assert told.lookups == 0  # a lookup of a long prompt takes milliseconds
    assert told.behind == 4  # others overtake it
