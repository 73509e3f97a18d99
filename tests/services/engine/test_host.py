"""Test how long requests wait for loads in the thread that steps a real engine."""

import asyncio
import contextlib
import math
import random
import threading
import time

import pytest

from baton.handoff.load.loader import State
from baton.handoff.params import load_params
from baton.services.engine import host as hosts
from baton.services.engine.info import info_of
from harness.engines import EngineProcess, Options, clear_prompt, generate, prefill, queue_batches
from harness.fake_worker import until
from harness.support import PATIENCE
from tests.handoff import checkpoints
from tests.handoff.engines import manifest_of, read, watched

pytestmark = pytest.mark.timeout(240)  # engines start within the first test

POLL_S = 20.0  # so long that a load seen only by the next poll is too late
POLLS_S = hosts._POLL_S, hosts._POLL_MOST_S, hosts._POLL_WOKEN_S


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine that hands over to itself."""
    model = checkpoints.qwen2(tmp_path_factory.mktemp("checkpoints") / "qwen2")
    with EngineProcess(Options(model, "hosted", engine={"enable_prefix_caching": False})) as process:
        yield process


class _Listener:
    """Collects the tokens of a request, and whether the end of a load was reported."""

    def __init__(self, name):
        self._name = name
        self.loaded = False
        self.tokens = []
        self.ended = asyncio.Event()

    def on_step(self, step):
        self.loaded |= bool(step.loaded)
        for output in (one for group in step.outputs.values() for one in group.outputs):
            if output.request_id == self._name:
                self.tokens += output.new_token_ids
                if output.finish_reason is not None:
                    self.ended.set()


@contextlib.contextmanager
def hosted(engine, listener):
    """Let a host's thread step the engine, and call the listener in the running loop."""
    plan = None
    host = hosts.EngineHost(plan)
    host._engine, host._connector, host._info = engine.core, engine.connector, info_of(engine.core)
    host._handoffs = engine.connector.scheduler_side
    host._woken = engine.connector.wake_on_loads(lambda: host._messages.put(lambda: None))
    host._loop, host._listener = asyncio.get_running_loop(), listener
    thread = threading.Thread(target=host._step_until_stopped)
    thread.start()
    try:
        yield host
    finally:
        host._messages.put(None)
        thread.join(2 * POLL_S)


def load_on_the_host(engine, name, prompt, manifest, depth):
    """Let the host's thread step the engine while it loads. Return the seconds until the answer's end."""
    queue_batches(engine, depth)
    hosts._POLL_S = hosts._POLL_MOST_S = hosts._POLL_WOKEN_S = POLL_S

    async def run():
        listener = _Listener(name)
        load = load_params(1, manifest.num_tokens, manifest, manifest.request_id)
        engine.add(name, prompt, 4, load)
        began = time.monotonic()
        with hosted(engine, listener):
            await asyncio.wait_for(listener.ended.wait(), 2 * POLL_S)
        assert listener.loaded
        return time.monotonic() - began

    try:
        return asyncio.run(run())
    finally:
        queue_batches(engine, 1)


def pull_during_a_step(engine, name, prompt, manifest, written):
    """Delay a step while a load begins, ends and is completed.

    Returns the answer, and in which step after that the request ran.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    loads = get_kv_transfer_group()._worker.loader._loads
    execute = engine.core.model_executor.execute_model
    entered, free, seen = threading.Event(), threading.Event(), list[bool]()

    def held_up(*args, **others):
        entered.set()
        assert free.wait(2 * POLL_S)
        return execute(*args, **others)

    async def run():
        listener = _Listener(name)
        engine.add(name, prompt, 7, load_params(1, manifest.num_tokens, saved_as=manifest.request_id))
        engine.add(f"{name}-beside", [5] * 40, 20)
        engine.step()
        engine.core.model_executor.execute_model = held_up
        ran = watched(engine, lambda output: seen.append(name in output.num_scheduled_tokens))
        with ran, hosted(engine, listener) as host:
            host._messages.put(lambda: None)
            await asyncio.to_thread(entered.wait, POLL_S)
            host.begin_load(name, 1, manifest)
            await until(lambda: loads[name, 1].state is State.HELD, "it is pulled during a step", POLL_S)
            host.resume(name, 1, manifest, lambda: engine.give(name, written))
            assert len(seen) == 1
            free.set()
            await asyncio.wait_for(listener.ended.wait(), 2 * POLL_S)
        return listener.tokens

    try:
        return asyncio.run(run()), seen.index(True)
    finally:
        free.set()
        engine.core.model_executor.execute_model = execute


def steps_while_waiting(engine, count):
    """Let `count` requests wait for their sources. Return how many steps it then takes in a second."""
    hosts._POLL_S, hosts._POLL_MOST_S, hosts._POLL_WOKEN_S = POLLS_S
    seen = []

    async def run():
        names = [f"waits-{number}" for number in range(count)]
        with watched(engine, seen.append), hosted(engine, _Listener("none")) as host:
            for name in names:
                request = engine.made(name, [5] * 40, 6, load_params(1, 40))
                host.submit(request)
            counted, seconds = math.inf, 0
            while counted > 2 and seconds < 10 * PATIENCE:  # it may still be taking the requests in
                before = len(seen)
                await asyncio.sleep(1.0)
                counted, seconds = len(seen) - before, seconds + 1
            host.abort(names)
            await until(lambda: not engine.core.scheduler.requests, "all requests have left", POLL_S)
        return counted

    return asyncio.run(run())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_end_of_a_load_is_noticed_at_once(engine, depth):
    prompt = random.Random(depth).choices(range(2, checkpoints.VOCAB), k=300)
    manifest = read(engine, f"saves-{depth}", prompt)
    took_s = engine.call(load_on_the_host, f"loads-{depth}", prompt, manifest, depth)
    assert took_s < POLL_S / 2, "it was noticed by the next poll"


def test_a_load_during_a_step_runs_in_the_next_one(engine):
    draw = random.Random("beside")
    prompt = clear_prompt(engine, lambda: draw.choices(range(2, checkpoints.VOCAB), k=300), 7)
    expected = engine.call(generate, "beside-alone", prompt, 7)
    kept = engine.call(prefill, "saved", prompt)
    tokens, steps = engine.call(pull_during_a_step, "beside", prompt, manifest_of(kept), kept.tokens)
    assert kept.tokens + tokens == expected
    assert steps == 1


def test_an_engine_does_not_step_while_all_requests_wait_for_their_sources(engine):
    assert engine.call(steps_while_waiting, 20) <= 2
