"""The engine's thread with several steps in flight, over real engines: who waits for a load, and how long."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.handoff.params import load_params
from baton.protos.handoff_pb2 import Manifest
from baton.services.engine import host as hosts
from harness.engines import Engine, EngineProcess, Options, prefill, queue_batches
from tests.handoff import checkpoints

pytestmark = pytest.mark.timeout(240)  # engines start within the first test

POLL_S = 5.0  # a load that is only seen by the next poll comes too late


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2(tmp_path_factory.mktemp("checkpoints") / "qwen2")


@pytest.fixture(scope="module")
def source(model: Path) -> Iterator[EngineProcess]:
    with EngineProcess(Options(model, "source")) as process:
        yield process


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineProcess]:
    with EngineProcess(Options(model, "hosted", cores="1")) as process:
        yield process


class _Listener:
    """Notes when a load's end is told of, and the request's last token."""

    def __init__(self) -> None:
        self.loaded_at = 0.0
        self.ended = asyncio.Event()

    def on_step(self, step: Any) -> None:
        if step.loaded:
            self.loaded_at = time.monotonic()
        outputs = [one for group in step.outputs.values() for one in group.outputs]
        if any(one.finish_reason is not None for one in outputs):
            self.ended.set()


def load_on_the_host(engine: Engine, name: str, prompt: list[int], manifest: Manifest, depth: int) -> float:
    """Let the host's thread step the engine while it loads; return the seconds until the answer's end."""
    queue_batches(engine, depth)
    hosts._POLL_S = hosts._POLL_MOST_S = hosts._POLL_WOKEN_S = POLL_S
    plan: Any = None
    host = hosts.EngineHost(plan)
    host._engine, host._connector = engine.core, engine.connector
    host._woken = engine.connector.wake_on_loads(lambda: host._messages.put(hosts._look))

    async def run() -> float:
        listener: Any = _Listener()
        host._loop, host._listener = asyncio.get_running_loop(), listener
        engine.add(name, prompt, 4, load_params(1, manifest.num_tokens, manifest))
        began = time.monotonic()
        thread = threading.Thread(target=host._step_until_stopped)
        thread.start()
        try:
            await asyncio.wait_for(listener.ended.wait(), 2 * POLL_S)
        finally:
            host._messages.put(None)
            thread.join(2 * POLL_S)
        assert listener.loaded_at
        return time.monotonic() - began

    return asyncio.run(run())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_end_of_a_load_is_noticed_at_once(
    engine: EngineProcess, source: EngineProcess, depth: int
) -> None:
    prompt = random.Random(depth).choices(range(2, checkpoints.VOCAB), k=300)
    saved = source.call(prefill, f"loads-{depth}", prompt).saved
    assert saved is not None
    assert saved.manifest is not None
    took_s = engine.call(load_on_the_host, f"loads-{depth}", prompt, saved.manifest, depth)
    assert took_s < POLL_S / 2, "it was noticed by the next poll"
