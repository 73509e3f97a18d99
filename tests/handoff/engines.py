"""Calls for engines in processes of their own (harness.engines.EngineProcess)."""

from contextlib import contextmanager

from baton.handoff.params import load_params
from harness.engines import prefill
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


# Runs in the engine's process.


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
