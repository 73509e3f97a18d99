"""Handoffs between two real engines, each in its own process.

Here the decode side gets only the prompt, as in stock vLLM: it computes the prompt's last position again and
must sample the same token as the prefill side.
"""

import random

import pytest

from baton.handoff.channels import HandoffClient
from baton.handoff.load.loader import State
from baton.handoff.params import load_params
from baton.handoff.reports import Loaded
from harness.engines import (
    BLOCK_SIZE,
    EngineProcess,
    Options,
    begin_decode,
    begin_prefill,
    clear_prompt,
    decode,
    end_prefill,
    generate,
    prefer,
    prefill,
    pulled,
)
from tests.handoff import checkpoints
from tests.handoff.caches import EVERY, TRANSPORTS, released
from tests.handoff.engines import (
    abort,
    decode_all,
    forget,
    free,
    loaded_of,
    prefill_all,
    pull_early,
    read,
    states,
    until_nothing_is_held,
)

LENGTHS = [1, 32, 33, 300]
WRITTEN = 8
_drawn = random.Random()

pytestmark = pytest.mark.timeout(240)  # engines start within the first test of each


@pytest.fixture(scope="module")
def reader(model):
    """The prefill side; also answers alone, as the reference."""
    with EngineProcess(Options(model, "prefill", transports=EVERY)) as engine:
        yield engine


@pytest.fixture(scope="module")
def writer(model, reader):
    """The decode side, preferring shared memory. One engine starts at a time."""
    with EngineProcess(Options(model, "decode", cores="1", transports=EVERY)) as engine:
        yield engine


@pytest.fixture(params=TRANSPORTS)
def transport(request, writer):
    name = request.param
    writer.call(prefer, name)
    return name


@pytest.fixture(autouse=True)
def _own_prompts(request):
    """Give each test its own prompts, independent of other tests."""
    _drawn.seed(request.node.name)


def prompt_of(length):
    return _drawn.choices(range(2, checkpoints.VOCAB), k=length)


def clear_prompt_of(reader, length, start=()):
    """Return a prompt without near-ties, as two engines may not add in the same order."""
    return clear_prompt(reader, lambda: [*start, *prompt_of(length)], WRITTEN)


@pytest.mark.parametrize("length", LENGTHS)
def test_two_engines_give_the_answer_of_one(reader, writer, transport, length):
    prompt, name = clear_prompt_of(reader, length), f"equal-{length}-{transport}"
    expected = reader.call(generate, f"{name}-alone", prompt, WRITTEN)
    manifest = read(reader, name, prompt)
    assert (manifest.num_tokens, manifest.num_blocks) == (length, -(-length // BLOCK_SIZE))
    answer = writer.call(decode, name, prompt, WRITTEN, manifest)
    assert answer.tokens == expected
    loaded_of(answer)
    blocks = -(-(length - 1) // BLOCK_SIZE)  # the last position is computed again
    assert answer.loaded.blocks == blocks
    assert answer.loaded.bytes == blocks * manifest.shards[0].record_bytes
    if blocks:
        assert answer.loaded.transport == transport
        assert 0 < answer.loaded.total_ms < 60_000
    until_nothing_is_held(reader)


def test_only_the_missing_blocks_are_pulled(reader, writer):
    start, name = prompt_of(3 * BLOCK_SIZE), "prefix"
    writer.call(generate, f"{name}-first", start + prompt_of(10), 1)
    prompt = clear_prompt_of(reader, 70, start)
    expected = reader.call(generate, f"{name}-alone", prompt, WRITTEN)
    answer = writer.call(decode, name, prompt, WRITTEN, read(reader, name, prompt))
    assert answer.tokens == expected
    assert answer.loaded.blocks == -(-(len(prompt) - 1) // BLOCK_SIZE) - 3
    until_nothing_is_held(reader)


def test_nothing_is_pulled_when_the_prefix_cache_has_it_all(reader, writer):
    prompt = clear_prompt_of(reader, 2 * BLOCK_SIZE + 1)
    expected = writer.call(generate, "all-here", prompt, WRITTEN)
    answer = writer.call(decode, "all-there", prompt, WRITTEN, read(reader, "all-there", prompt))
    assert answer.tokens == expected
    assert answer.loaded == Loaded("all-there", 1)
    until_nothing_is_held(reader)


def test_a_prompt_whose_start_was_cached_is_saved_whole(reader, writer):
    start = prompt_of(4 * BLOCK_SIZE)
    reader.call(generate, "cached-first", start, 1)
    prompt = clear_prompt_of(reader, 20, start)
    expected = reader.call(generate, "cached-alone", prompt, WRITTEN)
    assert writer.call(decode, "cached", prompt, WRITTEN, read(reader, "cached", prompt)).tokens == expected
    until_nothing_is_held(reader)


def write_many(engine, prompts, manifests):
    """Decode all at once, while another request runs."""
    running = engine.add("running", [5] * 40, 60)
    engine.run(until=lambda: len(running.tokens) > 3)
    answers = decode_all(engine, prompts, WRITTEN, manifests, {})
    assert len(running.tokens) == 60
    return {name: answer.tokens for name, answer in answers.items()}


def test_many_loads_while_a_batch_is_running(reader, writer):
    prompts = {
        f"many-{i}": clear_prompt_of(reader, length) for i, length in enumerate([40, 300, 33, 64, 129, 250])
    }
    expected = {
        name: reader.call(generate, f"{name}-alone", prompt, WRITTEN) for name, prompt in prompts.items()
    }
    manifests = {name: answer.saved.manifest for name, answer in reader.call(prefill_all, prompts).items()}
    assert writer.call(write_many, prompts, manifests) == expected
    until_nothing_is_held(reader)


def abort_before_pulling(engine, name, prompt, manifest):
    engine.add(name, prompt, WRITTEN, load_params(1, manifest.num_tokens, manifest))
    engine.core.abort_requests([name])
    engine.run()


def test_an_abort_before_the_pull_releases_the_source(reader, writer):
    prompt = prompt_of(100)
    writer.call(abort_before_pulling, "early", prompt, read(reader, "early", prompt))
    until_nothing_is_held(reader)


def take_over(engine, name, prompt, manifest):
    """Between two steps, end an attempt and begin the next one of the same request."""
    first = engine.add(name, prompt, 50)
    engine.run(until=lambda: bool(first.tokens))
    engine.core.abort_requests([name])
    second = engine.add(name, prompt, WRITTEN, load_params(2, manifest.num_tokens, manifest))
    engine.run()
    assert str(second.loaded.problem) == "None"
    return second.tokens


def test_the_end_of_an_attempt_does_not_stop_the_next_ones_load(reader, writer):
    prompt = clear_prompt_of(reader, 20)  # less than a block, so that the prefix cache keeps nothing
    expected = reader.call(generate, "again-alone", prompt, WRITTEN)
    manifest = reader.call(prefill, "again", prompt, 2).saved.manifest
    assert writer.call(take_over, "again", prompt, manifest) == expected
    until_nothing_is_held(reader)


def test_full_staging_is_reported_and_the_answer_still_comes(model):
    with EngineProcess(Options(model, "small", cores="0", handoff={"staging_mib": 1})) as small:
        answers = small.call(prefill_all, {f"full-{i}": prompt_of(300) for i in range(5)}).values()
        assert all(len(answer.tokens) == 1 for answer in answers)
        saved = [answer.saved for answer in answers]
        kept = [one.manifest for one in saved if one.manifest is not None]
        assert len(kept) == 3
        assert [str(one.problem).split(":")[0] for one in saved if one.manifest is None] == [
            "StagingFull"
        ] * 2
        client = HandoffClient()
        assert all(released(client, manifest) for manifest in kept)
        client.close()
        read(small, "later", prompt_of(300))


def test_a_quantised_handoff_gives_nearly_the_same_answer_and_an_unquantised_one_is_loaded_too(model, reader):
    """One engine is both ends; `reader` sends KV as it is."""
    wire = {"kv_wire_dtype": "int8"}
    own = {"enable_prefix_caching": False}
    options = Options(model, "quantised", cores="1", transports=EVERY, handoff=wire, engine=own)
    with EngineProcess(options) as quantised:
        for transport in EVERY:
            quantised.call(prefer, transport)
            prompt, name = clear_prompt_of(reader, 300), f"quantised-{transport}"
            as_it_is = read(reader, name, prompt)
            released(HandoffClient(), as_it_is)
            manifest = read(quantised, name, prompt)
            assert (manifest.wire_dtype, as_it_is.wire_dtype) == ("int8", "auto")
            assert manifest.compatibility_hash == as_it_is.compatibility_hash
            assert manifest.shards[0].record_bytes * 64 * 2 == as_it_is.shards[0].record_bytes * (64 + 4)
            answer = quantised.call(decode, name, prompt, WRITTEN, manifest)
            loaded_of(answer)
            assert (answer.loaded.transport, answer.loaded.blocks) == (transport, 10)
            assert answer.loaded.bytes == 10 * manifest.shards[0].record_bytes
            assert answer.finish_reason == "length"
            # With random weights some tokens may differ; the first one has KV with an error below 1 %.
            expected = reader.call(generate, f"{name}-alone", prompt, WRITTEN)
            assert answer.tokens[0] == expected[0]
        prompt = clear_prompt_of(reader, 70)
        expected = reader.call(generate, "as-it-is-alone", prompt, WRITTEN)
        answer = quantised.call(decode, "as-it-is", prompt, WRITTEN, read(reader, "as-it-is", prompt))
        assert answer.tokens == expected
        until_nothing_is_held(reader)  # before `quantised` ends, which sends the releases


STEP = 128  # tokens


def begin(reader, writer, name, prompt):
    """Prefill one step of a longer prompt, and pull it."""
    reader.call(forget)
    writer.call(begin_decode, name, prompt, WRITTEN, reader.call(begin_prefill, name, prompt))


@pytest.mark.parametrize("length", [STEP + 1, 2 * STEP, 300])
def test_a_prompt_is_pulled_while_it_is_prefilled(reader, writer, transport, length):
    prompt, name = clear_prompt_of(reader, length), f"stream-{length}-{transport}"
    expected = reader.call(generate, f"{name}-alone", prompt, WRITTEN)
    reader.call(forget)
    early, there, first, answer = pull_early(reader, writer, name, prompt, WRITTEN)
    record = early.shards[0].record_bytes
    assert (early.num_tokens, early.saved_at_s) == (length, 0)
    assert there == STEP // BLOCK_SIZE * record  # the records of the first step
    assert first.tokens == expected[:1]
    manifest = first.saved.manifest
    assert manifest.saved_at_s > 0
    assert manifest.chunks == -(-length // STEP)
    assert first.tokens + answer.tokens == expected
    assert answer.loaded.problem is None
    assert answer.loaded.bytes == manifest.num_blocks * record
    assert there <= answer.loaded.early_bytes <= answer.loaded.bytes
    until_nothing_is_held(reader)


def test_an_aborted_prefill_ends_the_early_pull(reader, writer):
    prompt, name = prompt_of(300), "given-up"
    before = reader.call(free), writer.call(free)
    begin(reader, writer, name, prompt)
    reader.call(abort, name)
    until_nothing_is_held(reader)
    writer.call(pulled, name, 1)
    assert writer.call(states) == {
        name: State.RESERVED
    }  # the worker's host would now hear of it from the source
    assert str(writer.call(abort, name).loaded.problem).startswith("PullCancelled: ")
    assert (reader.call(free), writer.call(free)) == before


def test_a_cancelled_early_pull_does_not_affect_the_prefill(reader, writer):
    prompt, name = clear_prompt_of(reader, 300), "left"
    expected = reader.call(generate, f"{name}-alone", prompt, WRITTEN)
    before = writer.call(free)
    begin(reader, writer, name, prompt)
    assert "PullCancelled" in str(writer.call(abort, name).loaded.problem)
    assert writer.call(free) == before
    first = reader.call(end_prefill, name)
    assert first.tokens == expected[:1]
    rest = writer.call(decode, name, prompt, WRITTEN, first.saved.manifest, 1, first.tokens)
    assert rest.loaded.problem is None  # everything came after the prefill
    assert rest.loaded.blocks == first.saved.manifest.num_blocks
    assert first.tokens + rest.tokens == expected
    until_nothing_is_held(reader)
