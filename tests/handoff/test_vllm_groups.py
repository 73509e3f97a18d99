"""Models with several groups: sliding windows and states. Each engine hands over to itself.

The decode side continues after the prefill side's token, as in a deployment. Nothing is computed twice, so a
state fits.
"""

import functools

import pytest

from baton.handoff.groups import final_records, num_records
from baton.handoff.params import load_params, save_params
from harness.architectures import language
from harness.architectures.registry import ARCHITECTURES
from harness.engines import (
    BLOCK_SIZE,
    EngineProcess,
    Options,
    decode,
    generate,
    least_gaps,
    prefer,
    prefill,
)
from tests.handoff.caches import EVERY, TRANSPORTS
from tests.handoff.engines import failing, forget, free, loaded_of, manifest_of, pull_early

WRITTEN = 24
LENGTHS = (16, 33, 200)
CLEAR = 0.1  # gap in log-probability: bfloat16 was seen to decide below 0.06
ENGINE = {"enable_prefix_caching": False, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 26}
WINDOWS, STATES = "ngram-gemma3", "mtp-qwen3-next"

pytestmark = pytest.mark.timeout(300)


def options(model, name="both", **engine):
    folder = model.checkpoint()
    drafts = {"speculative_config": model.speculative(folder)}
    own = ENGINE | {"dtype": model.dtype} | drafts | model.engine
    return Options(model.target(folder), name, transports=EVERY, engine=own | engine)


@pytest.fixture(scope="module")
def windows():
    """Sliding windows and full attention, with a prefix cache."""
    with EngineProcess(options(ARCHITECTURES[WINDOWS], enable_prefix_caching=True)) as engine:
        yield engine


@pytest.fixture(scope="module")
def states():
    """Gated DeltaNet, full attention, and an MTP layer."""
    with EngineProcess(options(ARCHITECTURES[STATES])) as engine:
        yield engine


@pytest.fixture(params=["windows", "states"])
def engine(request):
    found = request.getfixturevalue(request.param)
    found.call(forget)
    return found


@functools.cache
def clear(engine, length, start=()):
    """Return `start` and `length` more tokens, whose answer has no near-ties."""
    texts = {
        f"text-{length}-{number}": [*start, *language.prompt(number, 2 * length)[-length:]]
        for number in range(6)
    }
    gaps = engine.call(least_gaps, texts, WRITTEN)
    clearest = max(gaps, key=gaps.__getitem__)
    assert gaps[clearest] > CLEAR, gaps
    return texts[clearest]


def read(engine, name, prompt):
    answer = engine.call(prefill, name, prompt)
    (first,) = answer.tokens
    return first, manifest_of(answer)


def groups(engine):
    return engine.connector._scheduler._groups


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_handoff_gives_the_answer_of_one_engine(engine, transport):
    engine.call(prefer, transport)
    kept, before = engine.call(groups), engine.call(free)
    assert len(kept) > 1
    for length in LENGTHS:
        prompt, name = clear(engine, length), f"{transport}-{length}"
        expected = engine.call(generate, f"{name}-alone", prompt, WRITTEN)
        first, manifest = read(engine, name, prompt)
        assert manifest.num_blocks == num_records(kept, length)
        engine.call(forget)  # or there would be nothing left to pull
        answer = engine.call(decode, name, prompt, WRITTEN, manifest, 1, [first])
        assert [first, *answer.tokens] == expected
        loaded_of(answer)
        assert (answer.loaded.transport, answer.loaded.blocks) == (transport, manifest.num_blocks)
        assert answer.loaded.bytes == manifest.num_blocks * manifest.shards[0].record_bytes
    assert engine.call(free) == before


def go_on(engine, prompt, expected, manifests):
    """Continue after each of these numbers of tokens, all at once; return those with the expected answer."""
    answers = {}
    for count, manifest in manifests.items():
        params = load_params(1, manifest.num_tokens, manifest)
        answers[count] = engine.add(f"on-{count}", prompt, len(expected), params, written=expected[:count])
    engine.run()
    return [
        count
        for count, answer in answers.items()
        if answer.tokens == expected[count:] and answer.loaded is not None and answer.loaded.problem is None
    ]


def save_all(engine, prompt, expected):
    """Prefill the prompt with each number of its answer's tokens, as after the loss of a decode worker."""
    answers = {}
    for count in range(1, len(expected)):
        params = save_params(1)
        answers[count] = engine.add(f"on-{count}", prompt, count, params, written=expected[: count - 1])
    engine.run()
    assert all(answer.tokens == [expected[count - 1]] for count, answer in answers.items())
    return {count: answer.saved.manifest for count, answer in answers.items()}


def test_an_answer_can_continue_at_every_position(engine):
    """Some are where a window passes a block, or where a block of full attention begins."""
    prompt = clear(engine, 50)
    expected = engine.call(generate, "whole", prompt, WRITTEN)
    manifests = engine.call(save_all, prompt, expected)
    assert [one.num_tokens for one in manifests.values()] == [50 + count - 1 for count in manifests]
    engine.call(forget)
    assert engine.call(go_on, prompt, expected, manifests) == list(range(1, WRITTEN))


def save_beginning(engine, name, prompt):
    """Save a prompt from the prefix cache, as a worker does for another worker's prefill."""
    answer = engine.add(name, prompt, 1, save_params(1, cached=True))
    engine.run(lambda: answer.saved is not None)
    engine.core.abort_requests([name])
    return answer


def prefill_behind(engine, name, prompt, beginning):
    """Load a prompt's beginning, compute the rest, and save all."""
    prefix = load_params(1, beginning.num_tokens, beginning, saved_as=beginning.request_id)
    answer = engine.add(name, prompt, 1, save_params(1, prefix=prefix))
    engine.run()
    return answer


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_next_turn_loads_its_beginning_and_saves_it_with_the_rest(windows, transport):
    windows.call(forget)
    windows.call(prefer, transport)
    kept = windows.call(groups)
    asked, name = clear(windows, 150), f"chat-{transport}"
    written = windows.call(generate, f"{name}-first", asked, WRITTEN)
    chat = clear(windows, 100, (*asked, *written))
    held = (len(asked) + len(written) - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token has no KV
    beginning = windows.call(save_beginning, f"{name}-prefix", chat[: held + 1])
    assert beginning.saved.manifest is not None, beginning.saved.problem
    windows.call(forget)
    expected = windows.call(generate, f"{name}-alone", chat, WRITTEN)
    windows.call(forget)
    first = windows.call(prefill_behind, name, chat, beginning.saved.manifest)
    loaded_of(first)
    assert (first.loaded.tokens, first.loaded.blocks) == (held + 1, num_records(kept, held + 1))
    assert first.saved.manifest is not None, first.saved.problem
    windows.call(forget)
    rest = windows.call(decode, name, chat, WRITTEN, first.saved.manifest, 1, first.tokens)
    assert first.tokens + rest.tokens == expected


def test_a_prefix_of_a_state_cannot_be_saved(states):
    prompt = clear(states, 100)
    states.call(generate, "known", prompt, WRITTEN)
    refused = states.call(save_beginning, "state-prefix", prompt)
    assert refused.saved.problem is not None
    assert "NotCached" in str(refused.saved.problem)
    assert "a state has no prefix" in str(refused.saved.problem)
    assert not refused.tokens


def test_cached_blocks_of_several_groups_are_not_pulled(windows):
    """The missing blocks of each group are not adjacent, so there are several pulls."""
    windows.call(forget)
    start = language.prompt(99, 200)[: 3 * BLOCK_SIZE]
    prompt = clear(windows, 70, tuple(start))
    expected = windows.call(generate, "apart-alone", prompt, WRITTEN)
    first, manifest = read(windows, "apart", prompt)
    full, window = manifest.groups
    if full.first_block:
        full, window = window, full
    assert (full.num_blocks, window.first_block + window.num_blocks) == (6, 6)
    for transport in EVERY:
        windows.call(prefer, transport)
        windows.call(forget)
        windows.call(generate, f"{transport}-start", [*start, 5, 6], 1)
        answer = windows.call(decode, "apart", prompt, WRITTEN, manifest, 1, [first])
        assert [first, *answer.tokens] == expected
        assert loaded_of(answer).blocks == full.num_blocks - 3 + window.num_blocks
        first, manifest = read(windows, "apart", prompt)


def test_a_state_is_loaded_at_its_boundary_or_not_at_all(states):
    """If vLLM asks for one position before the end, nothing is loaded, and the answer is right."""
    prompt = clear(states, 60)
    expected = states.call(generate, "boundary-alone", prompt, WRITTEN)
    _, manifest = read(states, "boundary", prompt)
    answer = states.call(decode, "boundary", prompt, WRITTEN, manifest)
    assert answer.tokens == expected
    assert (answer.loaded.problem, answer.loaded.blocks) == (None, 0)


def test_a_failed_load_ends_its_request_and_nothing_else(engine):
    prompt = language.prompt(3, 100)
    _, manifest = read(engine, "spoilt", prompt)  # its epoch is 1
    engine.call(forget)
    ended, problem, lost = engine.call(failing, "spoilt", prompt, manifest, 2, [5])
    assert (ended, lost) == ("error []", 0)
    assert problem.startswith("StaleEpoch: ")


@pytest.fixture(params=[WINDOWS, STATES])
def decoding(request):
    """A prefill engine and a decode engine."""
    prefilling = request.getfixturevalue("windows" if request.param == WINDOWS else "states")
    cached = {"enable_prefix_caching": True} if request.param == WINDOWS else {}
    with EngineProcess(options(ARCHITECTURES[request.param], "decode", **cached)) as engine:
        engine.call(prefer, "tcp" if request.param == WINDOWS else "shm")
        yield prefilling, engine


def test_full_attention_is_pulled_early(decoding):
    """Windows and states come with the last step."""
    source, target = decoding
    kept, length = source.call(groups), 3 * 128 + 21
    prompt = clear(source, length)
    expected = source.call(generate, "early-alone", prompt, WRITTEN)
    for one in decoding:
        one.call(forget)
    early, there, first, answer = pull_early(source, target, "early", prompt, WRITTEN)
    assert first.tokens + answer.tokens == expected
    assert answer.loaded.blocks == num_records(kept, length)
    record = early.shards[0].record_bytes
    assert 0 < there <= final_records(kept, length) * record
    assert there <= answer.loaded.early_bytes
