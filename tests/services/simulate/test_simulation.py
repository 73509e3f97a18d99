import asyncio

import pytest

from baton.services.classes import Classes
from baton.services.config import RouterSettings, SchedulerSettings
from baton.services.router.errors import Why
from baton.services.simulate import tune
from baton.services.simulate.deployment import Setup, Split
from baton.services.simulate.figures import Goals
from baton.services.simulate.loop import VirtualLoop, run
from baton.services.simulate.mooncake import MooncakeTrace
from baton.services.simulate.profile import Engine, Handoff, Pace, Profile
from baton.services.simulate.simulation import _Simulation, simulate
from baton.services.simulate.traces import KINDS, Ask, Conversations, Kind

PACE = Pace(prefill=[(0, 0.01), (100, 0.11)], decode=[(0, 0.01), (100, 0.21)], overhead_s=0.005)
WAY = Handoff(token_bytes=1_000, bytes_per_s=1e6, latency_s=0.002, early=False)
PROFILE = Profile(pace=PACE, engine=Engine(step_tokens=100, batch=8, kv_tokens=4_000), handoff=WAY)
PAIR = Split(1, 1)
CHAT = Kind("small chats", 2, 30, 40, 20, 12, 4, 1.0)


def recorded(*asks):
    return MooncakeTrace(list(asks), block_tokens=10)


def chats(seconds=15.0, seed=0, per_s=6.0):
    return Conversations(CHAT, per_s, seconds, seed=seed, block_tokens=10, most_tokens=1_000)


def one(trace, split=PAIR, profile=PROFILE, **setup):
    return simulate(Setup(split, profile, warm_share=0.0, **setup), trace)


def test_the_times_of_a_request():
    hashes = [7_000 + at for at in range(16)]
    run_ = one(recorded(Ask(0.0, 150, 5, hashes), Ask(9.0, 155, 3, hashes)))
    first, second = run_.outcomes
    prefilled = 0.11 + 0.06  # 100 tokens, 50
    assert first.first == pytest.approx(prefilled + 0.005)
    # All KV is moved after the prompt, in 150 ms and 2 ms. Then four tokens take 12 ms each.
    assert first.ended == pytest.approx(prefilled + 0.152 + 4 * 0.012 + 0.005)
    assert (first.computed, first.hit, first.known) == (150, 0, 0)
    # Both workers have 150 tokens cached, so 5 are computed and moved.
    assert second.first - second.arrived == pytest.approx(0.015 + 0.005)
    assert second.ended - second.arrived == pytest.approx(0.015 + 0.007 + 2 * 0.012 + 0.005)
    assert (second.computed, second.hit, second.known) == (5, 150, 150)
    figures = run_.figures()
    assert figures["computed_tokens"] == 155
    assert figures["computed_share"] == pytest.approx(155 / 305, abs=1e-4)


def test_kv_that_is_moved_early_arrives_sooner():
    hashes = [7_000 + at for at in range(16)]
    early = PROFILE.model_copy(update={"handoff": WAY.model_copy(update={"early": True})})
    (outcome,) = one(recorded(Ask(0.0, 150, 5, hashes)), profile=early).outcomes
    # It is moved from the end of the first step, at 0.11, and takes 150 ms.
    assert outcome.ended == pytest.approx(0.11 + 0.15 + 0.002 + 4 * 0.012 + 0.005)


def test_speculation_shortens_the_answer():
    fast = PROFILE.model_copy(update={"pace": PACE.model_copy(update={"accepted": 2.0, "drafting": 1.5})})
    (outcome,) = one(recorded(Ask(0.0, 50, 9, [])), profile=fast).outcomes
    assert outcome.ended - outcome.first == pytest.approx(0.052 + 4 * 0.018)  # eight tokens in four steps


@pytest.mark.parametrize("split", [Split(2, 2), Split(mixed=3)], ids=str)
def test_the_same_seed_gives_the_same_outcome(split):
    runs = [one(chats(), split, seed=3).outcomes for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != one(chats(seed=1), split, seed=3).outcomes


def test_all_requests_end_and_nothing_stays_booked():
    loop = VirtualLoop()
    simulation = _Simulation(loop, Setup(Split(2, 2), PROFILE), chats(25.0, per_s=6.0), None)
    deployment = simulation._deployment

    async def whole():
        found = await simulation.run()
        await asyncio.sleep(1.0)  # the last reports arrive
        view = deployment.roster.view()
        booked = {key: one_.reserved.requests for key, one_ in view.workers.items()}
        return found, len(deployment.ledger.live), booked

    found, live, booked = run(whole(), loop)
    assert found.requests > 100
    assert [one_ for one_ in simulation._outcomes if one_.problem] == []
    assert all(one_.ended >= one_.first > one_.arrived for one_ in simulation._outcomes)
    assert live == 0
    assert set(booked) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert set(booked.values()) == {0}
    for worker in deployment.workers.values():
        assert worker.engine.cache.free == worker.engine.cache.blocks
        assert worker.pinned == worker.pinned_handoffs == 0


@pytest.mark.parametrize(
    ("ask", "after_s"),
    [
        (Ask(0.0, 900, 5, []), 0.5),  # during the prompt
        (Ask(0.0, 400, 5, []), 0.6),  # during the handoff
        (Ask(0.0, 50, 900, []), 1.0),  # while decoding
    ],
    ids=["prompt", "handoff", "decoding"],
)
def test_a_request_that_times_out_leaves_nothing_on_the_workers(ask, after_s):
    loop = VirtualLoop()
    setup = Setup(PAIR, PROFILE, router=RouterSettings(request_timeout_s=after_s))
    simulation = _Simulation(loop, setup, recorded(ask), None)

    async def whole():
        await simulation.run()
        await asyncio.sleep(0.2)  # the current steps

    run(whole(), loop)
    assert [out.problem for out in simulation._outcomes] == ["router.request_timeout_s"]
    for worker in simulation._deployment.workers.values():
        assert worker.engine.running == worker.engine.waiting == 0
        assert worker.engine.cache.free == worker.engine.cache.blocks
        assert worker.pinned == worker.pinned_handoffs == 0


def test_blocks_in_the_index_are_in_the_cache():
    # Turns are slow, so every heartbeat arrives before the next turn.
    slow = Kind("slow chats", 2, 100, 60, 40, 20, 6, 20.0)
    trace = Conversations(slow, 1.0, 300.0, block_tokens=10, most_tokens=900)
    large = PROFILE.model_copy(update={"engine": PROFILE.engine.model_copy(update={"kv_tokens": 50_000})})
    found = one(trace, Split(3, 3), large)
    known = [(out.known, out.hit) for out in found.outcomes]
    assert len(known) > 200
    assert sum(believed for believed, _ in known) > 10_000
    # Blocks of the last second may be unknown, but none is wrong.
    assert all(believed <= hit for believed, hit in known)
    assert sum(believed == hit for believed, hit in known) > 0.95 * len(known)


def test_cache_reports_reduce_computed_tokens():
    shares = {
        events: one(chats(30.0), Split(3, 3), events=events).figures()["computed_share"]
        for events in (True, False)
    }
    assert shares[True] < 0.8 * shares[False]


def test_caches_stay_known_between_rare_heartbeats():
    rare = SchedulerSettings(worker_lease_s=100.0)  # a heartbeat in 20 s
    hashes = [7_000 + at for at in range(16)]
    # Each worker reports at a random time up to 21 s, and again 20 s later.
    asks = [Ask(float(at), 150, 5, hashes) for at in (0, *range(22, 62))]
    found = one(recorded(*asks), scheduler=rare)
    assert [out.known for out in found.outcomes] == [0] + [149] * 40  # the last token is computed anyway


def test_full_workers_make_requests_wait():
    tight = SchedulerSettings(max_queued_prompt_tokens=150, idle_decode_tokens=0)
    asks = [Ask(0.001 * number, 100, 2, []) for number in range(6)]
    found = one(recorded(*asks), scheduler=tight)
    assert [out.problem for out in found.outcomes] == [""] * 6
    assert found.figures()["waited"] >= 4
    assert max(out.first_s for out in found.outcomes) == pytest.approx(6 * 0.11, abs=0.1)


def test_a_request_is_refused_if_the_queue_is_full():
    tight = SchedulerSettings(max_queued_prompt_tokens=150, idle_decode_tokens=0)
    asks = [Ask(0.05 * number, 800, 2, []) for number in range(4)]
    found = one(recorded(*asks), scheduler=tight, router=RouterSettings(max_waiting=1))
    assert [out.problem for out in found.outcomes] == ["", "", Why.QUEUE, Why.QUEUE]


def test_the_first_class_goes_first_at_the_worker_too():
    interactive, batch = Classes()
    asks = [Ask(0.001 * number, 100, 2, [], service=batch) for number in range(12)]
    late = Ask(0.02, 100, 2, [], service=interactive)
    found = one(recorded(*asks, late), routers=5)
    order = [out.service for out in sorted(found.outcomes, key=lambda out: out.first)]
    assert order.index("interactive") <= 4  # after at most four whose prompts had begun


def test_tune_gives_more_workers_to_the_longer_work():
    def best(prompt, output, per_s, workers, seconds):
        kind = Kind("", 1, 0, prompt, 0, output, 1, 0.0)
        quick = PROFILE.model_copy(update={"handoff": WAY.model_copy(update={"bytes_per_s": 1e9})})
        alone = SchedulerSettings(idle_decode_tokens=0)  # decode workers take no prompts
        setup = Setup(Split(1, 1), quick, alone, goals=Goals(0.6, 0.016))

        def trace():
            return Conversations(kind, per_s, seconds, block_tokens=10, most_tokens=1_000)

        found = tune.search(setup, trace, workers, lambda _: None)
        return next(one_.split for one_ in found if not one_.split.mixed), len(found)

    prompts, tried = best(200, 4, 12.0, 4, 8.0)
    answers, _ = best(20, 200, 2.5, 4, 10.0)
    assert (prompts.prefill, answers.prefill) == (3, 1)
    assert tried == 4  # three splits, and mixed workers
    many, tried = best(200, 4, 35.0, 16, 4.0)
    assert many.prefill > 8
    assert tried < 15


def test_kinds_have_their_sizes():
    for name, kind in KINDS.items():
        trace = Conversations(kind, 5.0, 400.0)
        asks = list(trace.begin())
        assert asks == sorted(asks, key=lambda ask: ask.at), name
        first = [ask for ask in asks if ask.turn == 1]
        mean = sum(ask.prompt for ask in first) / len(first)
        assert mean == pytest.approx(kind.begin + kind.first, rel=0.25), name
        assert all(len(ask.hashes) == (ask.prompt + ask.output) // trace.block_tokens for ask in asks)
        beginnings = {tuple(ask.hashes[: kind.begin // trace.block_tokens]) for ask in first if kind.begin}
        assert len(beginnings) <= kind.shared
