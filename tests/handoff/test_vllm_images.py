"""Prompts with images, handed over between real engines: each engine hands over to itself, with cold caches.

WHOLE_TABLE=1 runs all families.
"""

import os

import pytest

from baton.handoff.params import load_params, save_params
from baton.handoff.vllm.ec_connector import IMAGE_LOST
from baton.services.engine.patches import failed_step
from harness.architectures.registry import VISIONS
from harness.engines import EngineProcess
from harness.seeing import cold, metadata, options, preempt, prompt

WRITTEN = 10
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

_names = iter(range(1_000_000))


def whole(features):
    return features


def nothing(_):
    return ()


def alone(engine, mark, seeds):
    ids, features = prompt(engine, mark, seeds)
    answer = engine.add(f"alone-{next(_names)}", ids, WRITTEN, features=features)
    engine.run()
    cold(engine)
    return answer.tokens


def handed_over(engine, mark, seeds, how, *, keep=False):
    """Prefill and continue from saved KV. Return the tokens, how many were loaded, the prompt's length."""
    ids, features = prompt(engine, mark, seeds)
    name = f"handed-{next(_names)}"
    first = engine.add(name, ids, 1, save_params(1), features=features)
    engine.run()
    if not keep:
        cold(engine)
    params = load_params(1, first.saved.manifest.num_tokens, first.saved.manifest)
    rest = engine.add(name, ids, WRITTEN, params, written=first.tokens, features=how(features))
    engine.run()
    assert rest.loaded.problem is None
    if not keep:
        cold(engine)
    return first.tokens + rest.tokens, rest.loaded.tokens, len(ids)


def behind_another(engine, mark, how):
    """Hand B over to an engine that already has A, in a prompt that differs in nothing else."""
    saved = {}
    for seed in (A, B):
        ids, features = prompt(engine, mark, [seed])
        one = engine.add(f"save-{next(_names)}-{seed}", ids, 1, save_params(1), features=features)
        engine.run()
        saved[seed] = ids, features, one, [*engine.answers][-1]
    cold(engine)
    for seed in (A, B):
        ids, features, one, name = saved[seed]
        params = load_params(1, one.saved.manifest.num_tokens, one.saved.manifest)
        rest = engine.add(name, ids, WRITTEN, params, written=one.tokens, features=how(features))
        engine.run()
    cold(engine)
    return one.tokens + rest.tokens


def without_image(engine, mark):
    """Run a request whose image is neither available nor in the KV cache, and another one beside it."""
    ids, features = prompt(engine, mark, [A])
    beside = engine.add(f"beside-{next(_names)}", prompt(engine, mark, [])[0], WRITTEN)
    lost = engine.add(name := f"lost-{next(_names)}", ids, WRITTEN, features=metadata(features))
    request = engine.core.scheduler.requests[name]
    engine.run()
    cold(engine)
    return lost, getattr(request, IMAGE_LOST), features[0].identifier, beside.tokens


def preempted(engine, mark, how):
    """Preempt a request some tokens after its handoff, with cold caches. Return its tokens and end."""
    ids, features = prompt(engine, mark, [A, B])
    name = f"preempted-{next(_names)}"
    first = engine.add(name, ids, 1, save_params(1), features=features)
    engine.run()
    cold(engine)
    params = load_params(1, first.saved.manifest.num_tokens, first.saved.manifest)
    rest = engine.add(name, ids, WRITTEN, params, written=first.tokens, features=how(features))
    engine.run(lambda: len(rest.tokens) >= 3)
    preempt(engine)
    engine.run()
    cold(engine)
    return first.tokens + rest.tokens, rest.finish_reason


def preempted_behind_a_hit(engine, mark):
    """Preempt a request whose prompt came from the prefix cache, so that its images were not needed."""
    ids, features = prompt(engine, mark, [A, B])
    engine.add(f"warm-{next(_names)}", ids, 1, features=features)
    engine.run()
    answer = engine.add(f"hit-{next(_names)}", ids, WRITTEN, features=features)
    engine.run(lambda: len(answer.tokens) >= 3)
    preempt(engine)
    engine.run()
    cold(engine)
    return answer.tokens


def behind_a_failed_step(engine, mark):
    """Answer about an image that a step scheduled, and did not encode, because it failed."""
    ids, features = prompt(engine, mark, [A])
    recovery, executor = failed_step.FailedStep(engine.core), engine.core.model_executor
    engine.add(f"failing-{next(_names)}", ids, WRITTEN, features=features)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "execute_model", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failed:
            engine.step()
    recovery.recover(failed.value)
    answer = engine.add(f"behind-{next(_names)}", ids, WRITTEN, features=features)
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
