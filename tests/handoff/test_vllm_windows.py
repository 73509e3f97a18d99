"""Windowed saves between real engines: prompts larger than their window, or than all of staging.

The prefill side's staging has 31 slots and its cache 63 blocks. It has no prefix cache: what is not copied in
time is gone.
"""

import random

import pytest

from baton.handoff.params import save_params
from harness.engines import (
    BLOCK_SIZE,
    Engine,
    EngineProcess,
    Options,
    begin_decode,
    begin_prefill,
    clear_prompt,
    decode,
    end_decode,
    generate,
    prefer,
    pulled,
)
from tests.handoff import checkpoints
from tests.handoff.engines import abort, loaded_of, manifest_of, release, until

WRITTEN = 8
STEP = 128  # tokens
# Prompts have 700 or 1,010 tokens; the second has more records than staging has slots.
CACHE_BLOCKS = 64
SMALL = {"engine": {"num_gpu_blocks_override": CACHE_BLOCKS, "enable_prefix_caching": False}}

pytestmark = pytest.mark.timeout(240)  # engines start within the first test of each


@pytest.fixture(scope="module")
def reader(model):
    handoff = {"staging_mib": 1, "lease_s": 300}  # nobody renews here
    with EngineProcess(Options(model, "prefill", cores="0", handoff=handoff, **SMALL)) as engine:
        yield engine


@pytest.fixture(scope="module")
def writer(model, reader):
    options = Options(model, "decode", cores="1", engine={"enable_prefix_caching": False})
    with EngineProcess(options) as engine:
        yield engine


@pytest.fixture
def transport(request, writer):
    writer.call(prefer, request.param)
    return request.param


def prompt_of(name, length):
    """A prompt that depends only on its name and length."""
    return random.Random(f"{name}-{length}").choices(range(2, checkpoints.VOCAB), k=length)


def clear(reader, name, length):
    draw = random.Random(f"{name}-{length}")
    return clear_prompt(reader, lambda: draw.choices(range(2, checkpoints.VOCAB), k=length), WRITTEN)


def end(engine, name):
    """Run until a request ends, although its blocks may still be kept."""
    answer = engine.answers[name]
    engine.run(lambda: answer.finish_reason is not None)
    return answer


def prefill(engine, name, prompt):
    engine.add(name, prompt, 1, save_params(1))
    return end(engine, name)


def left(engine):
    """Step; return the free blocks, and the staged handoffs and bytes."""
    engine.step()
    staged = engine.connector.scheduler_side.staged()
    return engine.free_blocks, staged.handoffs, staged.bytes


def until_free(engine):
    until(lambda: engine.call(left) == (CACHE_BLOCKS - 1, 0, 0), "a handoff stayed pinned")


def windowed(answer, length):
    manifest = manifest_of(answer)
    assert manifest.num_blocks == -(-length // BLOCK_SIZE)
    assert manifest.shards[0].slots < manifest.num_blocks / 2
    return manifest


@pytest.mark.parametrize(("transport", "length"), [("shm", 700), ("tcp", 1010)], indirect=["transport"])
def test_a_whole_handoff_goes_through_a_window(reader, writer, transport, length):
    name = f"whole-{length}-{transport}"
    prompt = clear(reader, name, length)
    expected = reader.call(generate, f"{name}-alone", prompt, WRITTEN)
    first = reader.call(prefill, name, prompt)
    manifest = windowed(first, length)
    free, handoffs, held = reader.call(left)
    assert free == CACHE_BLOCKS - 1 - manifest.num_blocks  # kept until they are copied
    assert (handoffs, held) == (1, manifest.shards[0].slots * manifest.shards[0].record_bytes)
    answer = writer.call(decode, name, prompt, WRITTEN, manifest, 1, first.tokens)
    assert first.tokens + answer.tokens == expected
    loaded_of(answer)
    assert answer.loaded.transport == transport
    assert answer.loaded.bytes == manifest.num_blocks * manifest.shards[0].record_bytes
    until_free(reader)


@pytest.mark.parametrize(("transport", "length"), [("tcp", 700), ("shm", 1010)], indirect=["transport"])
def test_an_early_pull_goes_through_a_window(reader, writer, transport, length):
    name = f"early-{length}-{transport}"
    prompt = clear(reader, name, length)
    expected = reader.call(generate, f"{name}-alone", prompt, WRITTEN)
    early = reader.call(begin_prefill, name, prompt)
    record = early.shards[0].record_bytes
    there = writer.call(begin_decode, name, prompt, WRITTEN, early)
    first = reader.call(end, name)
    manifest = windowed(first, length)
    until(lambda: writer.call(pulled, name, 1) == 0, "the pull did not end")
    answer = writer.call(end_decode, name, first.tokens, manifest)
    assert first.tokens + answer.tokens == expected
    loaded_of(answer)
    assert there == STEP // BLOCK_SIZE * record
    assert answer.loaded.early_bytes == answer.loaded.bytes == manifest.num_blocks * record
    until_free(reader)


def preempt(engine, name, prompt, others):
    """Prefill with a preemption, then let other requests use the free blocks; return their number."""
    answer = engine.add(name, prompt, 1, save_params(1))
    for _ in range(4):
        engine.step()
    assert answer.begun is not None
    engine.core.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.core.scheduler.requests[name].num_preemptions == 1
    engine.run(lambda: answer.finish_reason is not None)
    free = engine.free_blocks
    written = [engine.add(f"{name}-{number}", tokens, 1) for number, tokens in enumerate(others)]
    engine.run(lambda: all(one.finish_reason is not None for one in written))
    return free


def test_a_preempted_prompt_hands_over_its_recomputed_kv(reader, writer):
    """Other requests get blocks that waited for slots."""
    name = "preempted"
    prompt = clear(reader, name, 700)
    expected = reader.call(generate, f"{name}-alone", prompt, WRITTEN)
    others = [prompt_of(f"{name}-{number}", 20 * BLOCK_SIZE) for number in range(3)]
    assert reader.call(preempt, name, prompt, others) < 3 * 20
    first = reader.call(end, name)
    answer = writer.call(decode, name, prompt, WRITTEN, windowed(first, 700), 1, first.tokens)
    loaded_of(answer)
    assert first.tokens + answer.tokens == expected
    until_free(reader)


def test_an_aborted_prefill_frees_blocks_that_wait_for_slots(reader, writer):
    name = "given-up"
    prompt = prompt_of(name, 1010)
    early = reader.call(begin_prefill, name, prompt)
    assert early is not None
    for _ in range(4):
        reader.call(Engine.step)
    reader.call(abort, name)
    until_free(reader)
    answer = writer.call(decode, name, prompt, WRITTEN, early)
    assert answer.finish_reason == "error"
    assert str(answer.loaded.problem).startswith(("LeaseExpired: ", "UnknownHandoff: "))


def steps(engine, name, prompt):
    """Prefill; return the number of steps, the save's problem, and the token."""
    answer = engine.add(name, prompt, 1, save_params(1))
    count = 0
    while answer.finish_reason is None:
        engine.step()
        count += 1
    return count, str(answer.saved.problem), answer.tokens


def test_a_save_that_is_not_pulled_slows_no_other_prompt(reader, writer):
    prompt = clear(reader, "beside", 700)
    expected = reader.call(generate, "beside-alone", prompt, WRITTEN)
    slow = reader.call(prefill, "slow", prompt_of("slow", 700)).saved
    assert slow is not None
    assert reader.call(steps, "beside", prompt) == (-(-700 // STEP), "None", expected[:1])
    short = reader.call(steps, "short", prompt_of("short", 100))
    assert short[:2] == (1, "None")
    manifest = reader.call(end, "beside").saved
    answer = writer.call(decode, "beside", prompt, WRITTEN, manifest.manifest, 1, expected[:1])
    assert expected[:1] + answer.tokens == expected
    _, handoffs, _ = reader.call(left)
    assert handoffs == 2  # those of the slow and the short prompt
    for name in ("slow", "short"):
        saved = reader.call(end, name).saved
        reader.call(release, saved.manifest)
    until_free(reader)
