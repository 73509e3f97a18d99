import asyncio

import pytest

from baton.prefix_keys import REMOVED
from baton.services.simulate.cache import Cache
from baton.services.simulate.engine import Job, Machine, SimulatedEngine
from baton.services.simulate.loop import Stalled, VirtualLoop, run
from baton.services.simulate.profile import Engine, Pace, Profile

BLOCK = 10
# A step takes 10 ms, and 1 ms per prompt token and 2 ms per decoding request.
PACE = Pace(prefill=[(0, 0.01), (100, 0.11)], decode=[(0, 0.01), (100, 0.21)])
PROFILE = Profile(pace=PACE, engine=Engine(step_tokens=100, batch=4, kv_tokens=1_000, max_model_len=900))


def on(scenario, profile=PROFILE):
    loop = VirtualLoop()
    engine = SimulatedEngine(loop, profile, BLOCK, Machine(profile.engine.cores))
    run(scenario(loop, engine), loop)
    return engine


def job(loop, prompt, output, *, given=False, name=0):
    """Return a request; those with the same `name` have the same blocks."""
    hashes = [1_000 * (name + 1) + at for at in range((prompt + output) // BLOCK)]
    return Job(hashes, prompt, output, given, loop.create_future())


def test_the_virtual_loop_skips_waits_and_detects_deadlocks():
    async def wait():
        await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert run(wait(), VirtualLoop()) == pytest.approx(1e6)
    with pytest.raises(Stalled):
        run(asyncio.Event().wait(), VirtualLoop())


def test_the_steps_of_a_request():
    async def scenario(loop, engine):
        one = job(loop, 150, 3)
        engine.submit(one)
        await one.over
        first = 0.11 + 0.06  # a step of 100 tokens, one of 50
        assert (one.first_piece_at, one.first_at) == (pytest.approx(0.11), pytest.approx(first))
        assert loop.time() == pytest.approx(first + 2 * 0.012)
        assert (engine.counts.computed_tokens, engine.counts.output_tokens) == (150, 3)

    engine = on(scenario)
    assert engine.cache.free == engine.cache.blocks
    assert engine.busy_s == pytest.approx(0.17 + 0.024)


def test_a_second_turn_hits_the_cached_first_one():
    async def scenario(loop, engine):
        one = job(loop, 95, 16)  # 110 tokens have KV: the last token has none
        engine.submit(one)
        await one.over
        two = job(loop, 130, 1)
        engine.submit(two)
        await two.over
        assert two.hit == 110
        assert engine.counts.computed_tokens == 95 + 20

    on(scenario)


def test_prompts_share_a_step_with_decoding_requests():
    async def scenario(loop, engine):
        stream = job(loop, 5, 100, given=True, name=9)
        engine.submit(stream)
        await asyncio.sleep(0.001)  # during its first step of 12 ms
        long, short = job(loop, 120, 1, name=1), job(loop, 40, 1, name=2)
        engine.submit(long)
        engine.submit(short)
        await short.over
        # Two prompts get half a step each. The short one is first in the queue and done in one step.
        assert loop.time() == pytest.approx(0.012 + 0.01 + 0.09 + 0.002)
        await long.over
        # The remaining 70 tokens of the long one take one step.
        assert loop.time() == pytest.approx(0.114 + 0.01 + 0.07 + 0.002)
        assert not stream.over.done()
        assert stream.next_at == pytest.approx(0.012)
        await stream.over

    on(scenario)


def test_a_handed_over_request_joins_at_the_end_of_a_step():
    async def scenario(loop, engine):
        one, two = job(loop, 50, 10, given=True, name=1), job(loop, 50, 4, given=True, name=2)
        engine.submit(one)
        await asyncio.sleep(0.030)  # 2.5 steps of 12 ms
        engine.submit(two)
        await two.over
        assert two.next_at == pytest.approx(0.036 + 0.014)
        assert loop.time() == pytest.approx(0.036 + 4 * 0.014)
        await one.over
        assert loop.time() == pytest.approx(0.036 + 4 * 0.014 + 3 * 0.012)
        assert engine.counts.computed_tokens == 0

    on(scenario)


def test_outputs_that_outgrow_the_cache_cause_a_preemption():
    small = PROFILE.model_copy(update={"engine": Engine(step_tokens=100, batch=4, kv_tokens=200)})

    async def scenario(loop, engine):
        jobs = [job(loop, 60, 80, given=True, name=name) for name in range(2)]
        for one in jobs:
            engine.submit(one)
        await asyncio.gather(*(one.over for one in jobs))
        # The second one was preempted. Its prompt was still cached, and its output was recomputed.
        assert engine.counts.prefix_hits == 60
        assert engine.counts.computed_tokens == pytest.approx(20, abs=12)

    engine = on(scenario, small)
    assert engine.cache.free == engine.cache.blocks


def test_an_aborted_request_leaves_after_the_current_step():
    """It may decode, compute its prompt or wait; computed blocks stay cached."""

    async def scenario(loop, engine):
        stream, other = job(loop, 50, 40, given=True, name=1), job(loop, 50, 40, given=True, name=2)
        engine.submit(stream)
        engine.submit(other)
        await asyncio.sleep(0.012 + 2.5 * 0.014)  # in the first step the stream is alone
        other.over.cancel()
        engine.abort(other)
        assert engine.running == 2
        await stream.over
        assert loop.time() == pytest.approx(0.012 + 3 * 0.014 + 36 * 0.012)
        prompt, queued = job(loop, 250, 1, name=3), job(loop, 900, 1, name=4)
        engine.submit(prompt)
        engine.submit(queued)
        assert (engine.running, engine.waiting) == (1, 1)
        await asyncio.sleep(0.001)
        for one in (prompt, queued):
            one.over.cancel()
            engine.abort(one)
        await asyncio.sleep(1.0)
        assert (engine.running, engine.waiting) == (0, 0)
        assert engine.counts.computed_tokens == 100  # one step
        again = job(loop, 250, 1, name=3)
        engine.submit(again)
        await again.over
        assert again.hit == 100

    engine = on(scenario)
    assert engine.cache.free == engine.cache.blocks


def test_aborting_a_request_that_has_ended_has_no_effect():
    async def scenario(loop, engine):
        one, two = job(loop, 50, 2, given=True, name=1), job(loop, 50, 9, given=True, name=2)
        engine.submit(one)
        engine.submit(two)
        await one.over
        engine.abort(one)
        await two.over
        engine.abort(two)
        assert engine.counts.output_tokens == 11

    engine = on(scenario)
    assert engine.cache.free == engine.cache.blocks


def test_workers_on_one_core_slow_each_other_down():
    loop = VirtualLoop()
    shared = PROFILE.model_copy(update={"engine": PROFILE.engine.model_copy(update={"cores": 1})})
    machine = Machine(1)
    engines = [SimulatedEngine(loop, shared, BLOCK, machine, number) for number in range(2)]

    async def both():
        jobs = [job(loop, 90, 1), job(loop, 90, 1)]
        engines[0].submit(jobs[0])
        await jobs[0].over
        assert loop.time() == pytest.approx(0.1)
        engines[0].submit(job(loop, 95, 1, name=5))
        engines[1].submit(jobs[1])
        await jobs[1].over
        return loop.time()

    assert run(both(), loop) == pytest.approx(0.1 + 2 * 0.1)


def test_the_cache_evicts_the_least_recently_used_and_the_end_of_a_prompt():
    cache = Cache(10)
    for name in (100, 200):
        held = cache.take([], 4)
        cache.name(held, [name + at for at in range(4)], 4)
        cache.release(held)
    assert cache.hit([100, 101, 102, 103]) == 4
    found = [100, 101]
    cache.release(cache.take(found, 2))  # uses these two again
    cache.take([], 5)  # evicts three of the others
    assert [one for one in (100, 101, 102, 103) if one in cache] == [100, 101]
    assert cache.hit([200, 201, 202, 203]) == 3
    change = cache.take_changes()
    assert not change.removed  # they were never reported as stored
    assert len(change.stored) == 5
    cache.take([], 5)
    assert len(cache.take_changes().removed) == 5
    assert not any(key & REMOVED for key in change.stored)
