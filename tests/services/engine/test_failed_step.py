"""Steps that raise in real engines: their requests end, and the others get the same answers as usual."""

import random
import time
from collections import deque
from dataclasses import dataclass

import pytest

from baton.handoff.params import load_params, save_params
from harness.engines import CALL_S, EngineProcess, Options, generate, prefill, queue_batches
from harness.poison import baton_poison, dose
from harness.support import eventually
from tests.handoff import checkpoints
from tests.handoff.engines import manifest_of, read

pytestmark = pytest.mark.timeout(240)  # engines start within the first test

PLACES = ["schedule", "execute", "forward", "sample", "draft", "update", "post"]
TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoints.qwen2(tmp_path_factory.mktemp("checkpoints") / "qwen2")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return checkpoints.eagle(tmp_path_factory.mktemp("checkpoints") / "eagle")


@pytest.fixture(scope="module")
def engine(model, drafter):
    options = Options(model, "fails", drafter=drafter, prepare=baton_poison.register)
    with EngineProcess(options) as process:
        process.call(install)
        yield process


@pytest.fixture(scope="module")
def source(model, drafter):
    """An engine that saves KV for the other one and does not fail."""
    with EngineProcess(Options(model, "source", cores="1", drafter=drafter)) as process:
        yield process


def prompt_of(name, length=150):
    return random.Random(name).choices(range(2, checkpoints.VOCAB), k=length)


@dataclass
class Failures:
    ended: list[list[str]]
    seen: list[str]


def install(engine):
    from baton.services.engine.patches import failed_step

    engine.core.failed = failed_step.install(engine.core)


def run(engine):
    """Step until idle, and recover from failed steps like the worker's host."""
    found = Failures([], [])
    deadline = time.monotonic() + CALL_S / 2
    while time.monotonic() < deadline:
        try:
            if not engine.step():
                return found
        except Exception as error:  # noqa: BLE001 (like the host)
            found.seen.append(str(error))
            found.ended.append(engine.core.failed.recover(error))
            engine.connector.scheduler_side.take_reports()
    raise TimeoutError("the engine did not become idle")


def poison(engine, name, prompt, xargs, params=None):
    engine.add(name, prompt, TOKENS, params)
    engine.core.scheduler.requests[name].sampling_params.extra_args = xargs


def among(engine, prompts, xargs):
    for name, prompt in prompts.items():
        engine.add(name, prompt, TOKENS)
    for number, one in enumerate(xargs):
        poison(engine, f"poison-{number}", prompt_of(f"poison-{number}", 70), one)
    return run(engine), whole(engine, prompts)


def whole(engine, names):
    """Return the tokens of the requests that were answered."""
    given = {name: engine.answers[name] for name in names}
    return {name: answer.tokens for name, answer in given.items() if answer.finish_reason is not None}


def blocks(engine):
    """Return the free blocks, the remaining saves and loads, and the staging blocks in use."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine.run()
    side = engine.connector.scheduler_side
    staging = get_kv_transfer_group()._worker_side.staging
    left = len(side._saving) + len(side._to_save) + len(side._loads)
    return engine.free_blocks, left, staging.capacity - staging.free_blocks


def settled(engine, expected):
    """Wait until `blocks` returns this, once releases have arrived."""
    eventually(lambda: blocks(engine) == expected, 2.5, f"the engine has {expected}", 0.01)


def answers(engine, turn, prompts):
    return {name: engine.call(generate, f"{name}-{turn}", prompt, TOKENS) for name, prompt in prompts.items()}


@pytest.mark.parametrize(("where", "after"), [*((one, 0) for one in PLACES), ("execute", 3)])
def test_requests_of_a_failed_step_end_and_later_ones_are_answered(engine, source, where, after):
    before = engine.call(blocks)
    prompts = {name: prompt_of(name) for name in (f"{where}-{after}-{number}" for number in range(4))}
    expected = answers(source, "alone", prompts)
    found, answered = engine.call(among, prompts, [dose("alone", where, after)])
    assert [where in seen for seen in found.seen] == [True], "the poison acts once"
    (ended,) = found.ended
    assert "poison-0" in ended
    assert set(prompts) <= {*answered, *ended}
    assert answers(engine, "again", prompts) == expected, "the prefix cache has wrong blocks"
    engine.call(settled, before)


def test_a_request_that_fails_while_it_joins_the_batch_leaves_it(engine, source):
    """The sampler's masks are filled after the request has been given a row."""
    before = engine.call(blocks)
    prompts = {f"half-{number}": prompt_of(f"half-{number}", 60) for number in range(3)}
    expected = answers(source, "alone", prompts)
    found, answered = engine.call(half, prompts)
    assert ["out of bounds" in seen for seen in found.seen] == [True]
    assert list(answered) == ["half-0"], "only the first one had ended before"
    assert answers(engine, "again", prompts) == expected
    engine.call(settled, before)


def half(engine, prompts):
    """Let a request join the batch and fail in the step in which another one leaves it."""
    first, *others = prompts
    answer = engine.add(first, prompts[first], TOKENS)
    for name in others:
        engine.add(name, prompts[name], 3 * TOKENS)
    engine.run(lambda: answer.finish_reason is not None)
    engine.add("half-poison", prompt_of("half-poison", 30), TOKENS)
    engine.core.scheduler.requests["half-poison"].sampling_params.allowed_token_ids = [10**6]
    return run(engine), whole(engine, prompts)


def test_waiting_requests_stay(engine, source):
    names = [f"waits-{number}" for number in range(6)]
    prompts = {name: prompt_of(name, 400) for name in names}  # some steps each
    expected = answers(source, "alone", prompts)
    found, answered = engine.call(first_then, prompts)
    assert len(found.seen) == 1
    assert answered, "requests that had not begun are answered"
    assert answered == {name: expected[name] for name in answered}


def first_then(engine, prompts):
    poison(engine, "poison-first", prompt_of("poison-first", 30), dose("alone"))
    return among(engine, prompts, [])


def test_two_requests_that_fail_together(engine):
    found, _ = engine.call(among, {}, [dose("pair", after=3), dose("pair", after=3)])
    assert found.ended == [["poison-0", "poison-1"]]


@pytest.mark.parametrize("where", ["schedule", "execute", "sample", "update"])
def test_handoffs_of_a_failed_step_are_cleaned_up(engine, source, where):
    before = engine.call(blocks)
    taken = source.call(blocks)
    prompt = prompt_of(f"handed-{where}", 300)
    expected = source.call(generate, f"alone-{where}", prompt, TOKENS)
    manifest = read(source, f"handed-{where}", prompt)
    found = engine.call(load_and_save, f"handed-{where}", prompt, manifest, where)
    assert len(found.seen) == 1
    engine.call(settled, before)  # blocks, loads, saves and staging are free again
    source.call(settled, taken)  # the source's save is released
    assert engine.call(generate, f"later-{where}", prompt, TOKENS) == expected


def load_and_save(engine, name, prompt, manifest, where):
    """Fail a step in which one request's load begins and another's prompt is saved."""
    engine.add(name, prompt, TOKENS, load_params(1, manifest.num_tokens, manifest))
    poison(engine, f"saves-{where}", prompt_of(f"saves-{where}", 100), dose("alone", where), save_params(1))
    return run(engine)


@pytest.mark.parametrize("where", ["schedule", "execute", "sample", "update"])
def test_requests_that_wait_for_kv_stay(engine, source, where):
    """They have not run, and nothing was written to their blocks."""
    before, taken = engine.call(blocks), source.call(blocks)
    prompt, name = prompt_of(f"waits-{where}", 300), f"waits-{where}"
    expected = source.call(generate, f"{name}-alone", prompt, TOKENS)
    kept = source.call(prefill, name, prompt)
    tokens = engine.call(fail_beside, name, prompt, manifest_of(kept), kept.tokens, where)
    assert kept.tokens + tokens == expected
    engine.call(settled, before)
    source.call(settled, taken)


def fail_beside(engine, name, prompt, manifest, written, where):
    """Fail a step while one request waits for its source. Return its tokens."""
    answer = engine.add(name, prompt, TOKENS, load_params(1, manifest.num_tokens))
    engine.step()
    poison(engine, f"fails-{where}", prompt_of(f"fails-{where}", 100), dose("alone", where))
    with pytest.raises(ValueError, match=where) as failed:
        engine.run()
    assert engine.core.failed.recover(failed.value) == [f"fails-{where}"]
    engine.resume(name, written, manifest)
    engine.run()
    return answer.tokens


def test_a_step_that_fails_while_a_later_one_runs_frees_everything(engine):
    """With two steps in flight, the later one has begun when the earlier one fails."""
    before = engine.call(blocks)
    found = engine.call(save_in_two_steps)
    assert ["sample" in seen for seen in found.seen] == [True]
    engine.call(settled, before)  # blocks, saves and staging are free again


def save_in_two_steps(engine):
    queue_batches(engine, 2)
    engine.core.failed._outputs = deque(maxlen=3)
    poison(engine, "saved-first", prompt_of("saved-first", 100), dose("alone", "sample"), save_params(1))
    engine.add("saved-next", prompt_of("saved-next", 100), TOKENS, save_params(1))
    try:
        return run(engine)
    finally:
        queue_batches(engine, 1)


def test_an_engine_that_cannot_answer_ends(engine):
    assert engine.call(broken) == "the device is gone"


def broken(engine):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def fail(*_, **__):
        raise ValueError("the device is gone")

    sample = GPUModelRunner._sample
    GPUModelRunner._sample = fail
    try:
        engine.add("meets-it", prompt_of("meets-it"), TOKENS)
        run(engine)
    except ValueError as error:
        return str(error)
    finally:
        GPUModelRunner._sample = sample
    return "it went on"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
        RuntimeError("CUDA driver error: unspecified launch failure"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: out of memory"),
    ],
)
def test_errors_of_the_device_are_fatal(error):
    from baton.services.engine.patches.failed_step import is_fatal

    wrapped = ValueError("around it")
    wrapped.__cause__ = error
    assert is_fatal(error)
    assert is_fatal(wrapped)
    assert not is_fatal(ValueError("shape mismatch"))
    assert not is_fatal(ValueError("the grammar 'out of memory' has no rule"))
