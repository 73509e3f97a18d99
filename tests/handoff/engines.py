"""Calls for engines in processes of their own (harness.engines.EngineProcess)."""

from contextlib import contextmanager

from baton.handoff.params import load_params, save_params
from harness.engines import begin_decode, begin_prefill, end_decode, end_prefill, prefill, pulled
from harness.support import eventually
from tests.handoff.caches import released


def until(what, why):
    eventually(what, 20, why, 0.01)


def manifest_of(answer):
    """Return the manifest of a save, which came with the first token."""
    assert answer.saved.problem is None
    assert answer.saved_with_first_token
    assert answer.saved.manifest is not None
    return answer.saved.manifest


def loaded_of(answer):
    """Return the report of a load that succeeded."""
    assert answer.loaded.problem is None
    return answer.loaded


def read(engine, name, prompt):
    return manifest_of(engine.call(prefill, name, prompt))


def until_nothing_is_held(engine):
    until(lambda: engine.call(held) == (0, 0), "a handoff stayed pinned")


def pull_early(source, target, name, prompt, count):
    """Hand a prompt over while it is prefilled.

    Returns the manifest and the bytes of its first step, the source's answer, and the target's.
    """
    early = source.call(begin_prefill, name, prompt)
    there = target.call(begin_decode, name, prompt, count, early)
    first = source.call(end_prefill, name)
    target.call(pulled, name, 1)
    return early, there, first, target.call(end_decode, name, first.tokens, manifest_of(first))


def hand_over(source, target, prompts, expected, *, stock=False):
    """Hand over all prompts at once, and compare the answers. Return the target's, and the manifests.

    stock: as in stock vLLM, the target gets no token, and computes the prompt's last position again.
    """
    name = f"{source.name}-{target.name}"
    named = {f"{name}-{number}": prompt for number, prompt in enumerate(prompts)}
    firsts = source.call(prefill_all, named)
    manifests = {key: manifest_of(first) for key, first in firsts.items()}
    written = {} if stock else {key: first.tokens for key, first in firsts.items()}
    answers = target.call(decode_all, named, len(expected[0]), manifests, written)
    problems = [str(one.loaded.problem) for one in answers.values() if one.loaded and one.loaded.problem]
    assert problems == []
    found = [written.get(key, []) + answer.tokens for key, answer in answers.items()]
    equal = sum(one == right for one, right in zip(found, expected, strict=True))
    assert f"{name}: {equal}" == f"{name}: {len(prompts)}"
    assert source.call(held) == (0, 0)
    return [*answers.values()], [*manifests.values()]


# Runs in the engine's process.


def prefill_all(engine, prompts):
    answers = {name: engine.add(name, prompt, 1, save_params(1)) for name, prompt in prompts.items()}
    engine.run()
    return answers


def decode_all(engine, prompts, count, manifests, written):
    answers = {}
    for name, prompt in prompts.items():
        params = load_params(1, manifests[name].num_tokens, manifests[name])
        answers[name] = engine.add(name, prompt, count, params, written=written.get(name, ()))
    engine.run()
    return answers


def generate_all(engine, prompts, count):
    """Answer all prompts at once, without a handoff."""
    answers = [engine.add(f"alone-{number}", prompt, count) for number, prompt in enumerate(prompts)]
    engine.run()
    return [answer.tokens for answer in answers]


def forget(engine):
    assert engine.core.scheduler.reset_prefix_cache()


def free(engine):
    return engine.free_blocks


def held(engine):
    staged = engine.connector.scheduler_side.staged()
    return staged.handoffs, staged.bytes


@contextmanager
def watched(engine, note):
    """Pass the scheduler's output of each step to `note`."""
    scheduler = engine.core.scheduler
    schedule = scheduler.schedule

    def noting(throttle_prefills=False):
        output = schedule(throttle_prefills)
        note(output)
        return output

    scheduler.schedule = noting
    try:
        yield
    finally:
        scheduler.schedule = schedule


def release(engine, manifest):
    released(engine.connector.scheduler_side.client, manifest)


def rank():
    """Return the rank's side, which is in the same process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def states(engine):
    """Return the state of each load that is not reported yet."""
    del engine
    return {name: load.state for (name, _), load in rank().loader._loads.items()}


def abort(engine, name):
    """Abort a request, and step until it holds nothing."""
    engine.core.abort_requests([name])
    engine.run()
    return engine.answers[name]


def failing(engine, name, prompt, manifest, epoch=1, written=None):
    """Load in vain; return how the request ended, why, and how many blocks it cost."""
    before = engine.free_blocks
    params = load_params(epoch, manifest.num_tokens, manifest)
    answer = engine.add(name, prompt, 8, params, written=written or ())
    engine.run()
    return f"{answer.finish_reason} {answer.tokens}", str(answer.loaded.problem), before - engine.free_blocks
