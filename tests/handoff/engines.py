"""Calls for engines in processes of their own (harness.engines.EngineProcess)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from baton.handoff.load.loader import State
from baton.handoff.params import load_params
from baton.handoff.reports import Loaded
from baton.protos.handoff_pb2 import Manifest
from harness.engines import Answer, Engine, EngineProcess, prefill
from harness.support import PATIENCE
from tests.handoff.caches import released


def until(what: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + 20 * PATIENCE
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def manifest_of(answer: Answer) -> Manifest:
    """Return the manifest of a save, which came with the first token."""
    assert answer.saved is not None
    assert answer.saved.problem is None
    assert answer.saved_with_first_token
    assert answer.saved.manifest is not None
    return answer.saved.manifest


def loaded_of(answer: Answer) -> Loaded:
    """Return the report of a load that succeeded."""
    assert answer.loaded is not None
    assert answer.loaded.problem is None
    return answer.loaded


def read(engine: EngineProcess, name: str, prompt: list[int]) -> Manifest:
    """Prefill a prompt and save it."""
    return manifest_of(engine.call(prefill, name, prompt))


def until_nothing_is_held(engine: EngineProcess) -> None:
    until(lambda: engine.call(held) == (0, 0), "a handoff stayed pinned")


# Runs in the engine's process.


def forget(engine: Engine) -> None:
    assert engine.core.scheduler.reset_prefix_cache()


def free(engine: Engine) -> int:
    return engine.free_blocks


def held(engine: Engine) -> tuple[int, int]:
    staged = engine.connector.scheduler_side.staged()
    return staged.handoffs, staged.bytes


@contextmanager
def watched(engine: Engine, note: Callable[[Any], object]) -> Iterator[None]:
    """Pass the scheduler's output of each step to `note`."""
    scheduler = engine.core.scheduler
    schedule = scheduler.schedule

    def noting(throttle_prefills: bool = False) -> Any:
        output = schedule(throttle_prefills)
        note(output)
        return output

    scheduler.schedule = noting
    try:
        yield
    finally:
        scheduler.schedule = schedule


def release(engine: Engine, manifest: Manifest) -> None:
    released(engine.connector.scheduler_side.client, manifest)


def rank() -> Any:
    """Return the rank's side, which is in the same process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def states(engine: Engine) -> dict[str, State]:
    """Return the state of each load that is not reported yet."""
    del engine
    return {name: load.state for (name, _), load in rank().loader._loads.items()}


def abort(engine: Engine, name: str) -> Answer:
    """Abort a request, and step until it holds nothing."""
    engine.core.abort_requests([name])
    engine.run()
    return engine.answers[name]


def failing(
    engine: Engine,
    name: str,
    prompt: list[int],
    manifest: Manifest,
    epoch: int = 1,
    written: list[int] | None = None,
) -> tuple[str, str, int]:
    """Load in vain; return how the request ended, why, and how many blocks it cost."""
    before = engine.free_blocks
    params = load_params(epoch, manifest.num_tokens, manifest)
    answer = engine.add(name, prompt, 8, params, written=written or ())
    engine.run()
    return f"{answer.finish_reason} {answer.tokens}", str(answer.loaded.problem), before - engine.free_blocks
