"""Prompts with images, handed over between real engines: each engine hands over to itself, with cold caches.

WHOLE_TABLE=1 runs all families.
"""

import os

import pytest

from baton.handoff.params import load_params, save_params
from baton.handoff.vllm.ec_connector import IMAGE_LOST
from harness.architectures.registry import VISIONS
from harness.engines import EngineProcess
from harness.seeing import WRITTEN, add, alone, cold, fail_step, metadata, options, preempt, prompt

A, B = 1, 2  # images of one size
MODELS = list(VISIONS) if "WHOLE_TABLE" in os.environ else ["qwen2.5-vl", "qwen3.5-vision"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return VISIONS[request.param]


@pytest.fixture(scope="module")
def engine(model):
    with EngineProcess(options(model, "both")) as one:
        yield one


# These run in the engine's process. how: the function that makes a request's features.


def whole(features):
    return features


def nothing(_):
    return ()


def resumed(engine, name, ids, first, features):
    """Continue a saved request."""
    params = load_params(1, first.saved.manifest.num_tokens, first.saved.manifest)
    return engine.add(name, ids, WRITTEN, params, written=first.tokens, features=features)


def saved_and_resumed(engine, mark, seeds, how):
    """Prefill, clear the caches, and queue the rest. Return both answers, and the prompt's length."""
    ids, features = prompt(engine, mark, seeds)
    name, first = add(engine, ids, 1, save_params(1), features=features)
    engine.run()
    cold(engine)
    return first, resumed(engine, name, ids, first, how(features)), len(ids)


def handed_over(engine, mark, seeds, how):
    """Prefill and continue from saved KV. Return the tokens, how many were loaded, the prompt's length."""
    first, rest, length = saved_and_resumed(engine, mark, seeds, how)
    engine.run()
    assert rest.loaded.problem is None
    cold(engine)
    return first.tokens + rest.tokens, rest.loaded.tokens, length


def behind_another(engine, mark, how):
    """Hand B over to an engine that already has A, in a prompt that differs in nothing else."""
    saved = []
    for seed in (A, B):
        ids, features = prompt(engine, mark, [seed])
        name, first = add(engine, ids, 1, save_params(1), features=features)
        engine.run()
        saved.append((name, ids, first, how(features)))
    cold(engine)
    for given in saved:
        rest = resumed(engine, *given)
        engine.run()
    cold(engine)
    return first.tokens + rest.tokens


def without_image(engine, mark):
    """Run a request whose image is neither available nor in the KV cache, and another one beside it."""
    ids, features = prompt(engine, mark, [A])
    _, beside = add(engine, prompt(engine, mark, [])[0], WRITTEN)
    name, lost = add(engine, ids, WRITTEN, features=metadata(features))
    request = engine.core.scheduler.requests[name]
    engine.run()
    cold(engine)
    return lost, getattr(request, IMAGE_LOST), features[0].identifier, beside.tokens


def preempted(engine, mark, how):
    """Preempt a request some tokens after its handoff, with cold caches. Return its tokens and end."""
    first, rest, _ = saved_and_resumed(engine, mark, [A, B], how)
    engine.run(lambda: len(rest.tokens) >= 3)
    preempt(engine)
    engine.run()
    cold(engine)
    return first.tokens + rest.tokens, rest.finish_reason


def preempted_behind_a_hit(engine, mark):
    """Preempt a request whose prompt came from the prefix cache, so that its images were not needed."""
    ids, features = prompt(engine, mark, [A, B])
    add(engine, ids, 1, features=features)
    engine.run()
    _, answer = add(engine, ids, WRITTEN, features=features)
    engine.run(lambda: len(answer.tokens) >= 3)
    preempt(engine)
    engine.run()
    cold(engine)
    return answer.tokens


def behind_a_failed_step(engine, mark):
    """Answer about an image that a step scheduled, and did not encode, because it failed."""
    ids, features = prompt(engine, mark, [A])
    name, _ = add(engine, ids, WRITTEN, features=features)
    assert fail_step(engine) == [name]
    _, answer = add(engine, ids, WRITTEN, features=features)
    engine.run()
    cold(engine)
    return answer.tokens


@pytest.mark.parametrize("seeds", [[A], [A, B], [B, A], [A, A]], ids=["A", "AB", "BA", "AA"])
def test_metadata_are_enough_behind_the_kv(engine, model, seeds):
    expected = engine.call(alone, model.mark, seeds)
    tokens, loaded, length = engine.call(handed_over, model.mark, seeds, metadata)
    assert tokens == expected
    assert loaded == length


def test_answers_depend_on_the_images(engine, model):
    asked = ([], [A], [B], [A, B], [B, A], [A, A])
    answers = [tuple(engine.call(alone, model.mark, seeds)) for seeds in asked]
    if model.dtype == "bfloat16":  # rounding may make some answers equal
        assert len(set(answers)) > 1
    else:
        assert len(set(answers)) == len(asked)


def test_lost_metadata_would_be_noticed(engine, model):
    """Without metadata, positions are wrong: the tests above are not equal by luck."""
    if model.name not in ("qwen2.5-vl", "qwen3-vl"):
        pytest.skip("its positions do not depend on images, or its random weights ignore them")
    expected = engine.call(alone, model.mark, [A])
    assert engine.call(handed_over, model.mark, [A], nothing)[0] != expected


def test_an_image_is_not_taken_for_another(engine, model):
    """Equal tokens, other image: the KV blocks must have other names at the decode side, too."""
    expected = engine.call(alone, model.mark, [B])
    assert engine.call(behind_another, model.mark, metadata) == expected
    if model.name == "qwen2.5-vl":
        assert engine.call(behind_another, model.mark, nothing) != expected, "the test notices nothing"


def test_a_request_without_its_image_fails_alone(engine, model):
    expected = engine.call(alone, model.mark, [])
    answer, lost, identifier, beside = engine.call(without_image, model.mark)
    assert (answer.tokens, answer.finish_reason, lost) == ([], "error", identifier)
    assert beside == expected


def test_a_preempted_request(engine, model):
    rounds = model.dtype == "bfloat16"  # what follows tokens that are computed again may then differ
    expected = engine.call(alone, model.mark, [A, B])
    tokens, end = engine.call(preempted, model.mark, whole)
    assert (len(tokens), end) == (WRITTEN, "length")
    kept = 3 if rounds else WRITTEN
    assert tokens[:kept] == expected[:kept]
    tokens, end = engine.call(preempted, model.mark, metadata)
    assert (tokens, end) == (expected[: len(tokens)], "error")
    assert 3 <= len(tokens) < WRITTEN
    if not rounds:
        assert engine.call(preempted_behind_a_hit, model.mark) == expected


def test_an_image_of_a_failed_step_is_encoded_anew(engine, model):
    expected = engine.call(alone, model.mark, [A])
    assert engine.call(behind_a_failed_step, model.mark) == expected
