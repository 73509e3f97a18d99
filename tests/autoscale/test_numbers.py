import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from baton.autoscale.capacity import Capacity, CapacityMeter, Gap
from baton.autoscale.demand import Demand, DemandMeter
from baton.autoscale.goals import TARGET, Bounds, Goals
from baton.autoscale.histogram import SECONDS, TOKENS, Histogram, middles, share_below
from baton.autoscale.queueing import first_tokens_within, gaps_within, requests_each
from baton.autoscale.seen import Member
from baton.autoscale.sizing import FEW, Counts, work
from baton.protos import scheduler_pb2 as pb

P, D, E = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_ENCODE
GOALS = Goals("on", 1.0, 0.05, Bounds(1, 20), Bounds(1, 20), 2.0, 60.0, 10.0)


def test_bounds_of_buckets_are_inclusive():
    one = Histogram(TOKENS)
    for value in (1, 16, 17, 10**9):
        one.add(value)
    assert (one.counts[0], one.counts[1], one.counts[-1]) == (2, 1, 1)
    assert middles([0, 3, 1] + [0] * (len(TOKENS) - 2), TOKENS) == [(24.0, 0.75), (48.0, 0.25)]


def test_the_share_below_a_limit_is_interpolated():
    draw = random.Random(1)
    values = [draw.lognormvariate(-1, 0.7) for _ in range(5_000)]
    one = Histogram(SECONDS)
    for value in values:
        one.add(value)
    for limit in (0.05, 0.2, 0.37, 1.0, 3.0):
        real = sum(value <= limit for value in values) / len(values)
        assert share_below(one.counts, SECONDS, limit) == pytest.approx(real, abs=0.02)
    assert share_below(one.counts, SECONDS, 1_000.0) == 1.0
    assert share_below([0] * len(one.counts), SECONDS, 1.0) is None


def router(requests, prompt=100, output=20, waiting=0):
    """Return the report of a router with this many finished requests."""
    prompts = Histogram(TOKENS)
    prompts.add(prompt)
    return pb.RouterLoad(
        prompts=[count * requests for count in prompts.counts],
        prompt_tokens=requests * prompt,
        over=requests,
        output_tokens=requests * output,
        waiting=waiting,
    )


def test_rates_follow_routers_counts():
    meter = DemandMeter()
    for step in range(60):
        loads = {"a": router(1_000 + 8 * step), "b": router(2 * step, 300, waiting=3)}
        demand = meter.take(2.0 * step, loads)
    assert demand.requests_per_s == pytest.approx(5.0, rel=0.01)
    assert demand.prompt_tokens_per_s == pytest.approx(4 * 100 + 300, rel=0.01)
    assert (demand.output_tokens, demand.waiting) == (pytest.approx(20), 3)
    assert meter.totals.requests == 59 * 10  # the earlier counts of `a` are left out


def test_images_are_counted_apart_from_prompts():
    meter = DemandMeter()
    images = Histogram(TOKENS)
    assert meter.take(0.0, {"a": pb.RouterLoad()}).images == []
    for step in range(1, 30):
        images.add(1_000)
        load = pb.RouterLoad(images=images.counts, image_tokens=1_000 * step)
        demand = meter.take(2.0 * step, {"a": load})
    assert demand.images == [(768.0, 1.0)]
    assert demand.image_tokens_per_s == pytest.approx(500, rel=0.01)
    assert (demand.prompts, demand.prompt_tokens_per_s) == ([], 0.0)


@pytest.mark.parametrize("size", [0, 3, 40])
def test_a_router_may_have_other_buckets(size):
    meter = DemandMeter()
    meter.take(0.0, {"a": pb.RouterLoad(), "b": pb.RouterLoad()})
    odd = pb.RouterLoad(prompts=[5] * size, first_token=[5] * size)
    assert meter.take(2.0, {"a": router(5), "b": odd}).prompts
    assert len(meter.totals.load.first_token) == len(SECONDS) + 1


def test_an_absurd_count_stops_no_later_step():
    meter = DemandMeter()
    meter.take(0.0, {"a": pb.RouterLoad()})
    for step, most in enumerate((2**64 - 1, 0, 2**64 - 1), 1):
        meter.take(2.0 * step, {"a": pb.RouterLoad(over=most, prompts=[most], waiting=most % 2**32)})
    assert meter.take(8.0, {"b": router(5)}).prompt_tokens_per_s >= 0


def test_routers_come_and_go():
    meter = DemandMeter()
    meter.take(0.0, {"a": router(50)})
    meter.take(2.0, {"a": router(60), "new": router(7)})
    meter.take(4.0, {"new": router(7)})
    meter.take(6.0, {"a": router(65), "new": router(7)})
    assert meter.totals.requests == 10 + 7 + 5


def member(name, role, **counts):
    load = pb.WorkerLoad(counts=pb.EngineCounts(**counts))
    return Member(name, name, role, True, False, True, load, 0, 0, 32)


def test_prefill_speed_is_known_however_idle_a_worker_is():
    meter = CapacityMeter()
    meter.take(0.0, [member("p", P, computed_tokens=9_000, busy_s=1.0)])
    learned = meter.take(
        100.0, [member("p", P, computed_tokens=9_600, prefix_hits=200, busy_s=1.5, output_tokens=3)]
    )
    assert learned.tokens_per_s == pytest.approx(1_200)
    assert learned.uncached == pytest.approx(0.75)
    assert learned.gap is None
    later = meter.take(200.0, [member("p", P, computed_tokens=9_600, prefix_hits=200, busy_s=1.5)])
    assert later.tokens_per_s == pytest.approx(1_200)  # nothing new


def test_the_speed_of_encode_workers_and_what_they_keep():
    meter = CapacityMeter()

    def encoder(images, found=0):
        one = member("e", E, computed_tokens=500 * images, busy_s=0.1 * images)
        one.load.embeddings.CopyFrom(pb.Embeddings(computed=images, found=found))
        return one

    assert meter.take(0.0, [encoder(7)]).image_tokens_per_s is None
    learned = meter.take(2.0, [encoder(10), member("p", P)])
    assert (learned.image_tokens_per_s, learned.new_images) == (pytest.approx(5_000), 1.0)
    learned = meter.take(4.0, [encoder(10, found=9)])  # without a step
    assert learned.image_tokens_per_s == pytest.approx(5_000)
    assert learned.new_images == pytest.approx(0.25, rel=0.01)
    assert learned.tokens_per_s is None


def decoded(meter, sizes, base=0.01, slope=0.002):
    """Let a worker decode for 10 s with each batch size."""
    busy = request = tokens = 0.0
    learned = meter.take(0.0, [member("d", D)])
    for at, size in enumerate(sizes, 1):
        busy += 10
        request += 10 * size
        tokens += 10 * size / (base + slope * size)
        counts = {"busy_s": busy, "request_s": request, "output_tokens": round(tokens)}
        learned = meter.take(10.0 * at, [member("d", D, **counts)])
    return learned


def test_the_gap_is_fitted_by_a_line():
    gap = decoded(CapacityMeter(), [4, 12, 7, 20, 15]).gap
    assert (gap.base, gap.slope) == (pytest.approx(0.01, rel=0.1), pytest.approx(0.002, rel=0.05))


def test_batches_of_one_size_give_the_prior_slope():
    gap = decoded(CapacityMeter(), [8, 8, 8]).gap
    assert gap.at(8) == pytest.approx(0.026, rel=0.01)
    assert gap.at(32) == pytest.approx(0.026 * 64 / 40, rel=0.01)


def test_prefills_and_role_changes_do_not_count_for_gaps():
    meter = CapacityMeter()
    meter.take(0.0, [member("d", D), member("x", P)])
    counts = {"busy_s": 5.0, "request_s": 10.0, "output_tokens": 50}
    prefilled = member("d", D, computed_tokens=5_000, **counts)
    assert meter.take(5.0, [prefilled, member("x", D, **counts)]).gap is None


def queue(servers, load, goal_s, draw):
    """Simulate a queue; return the share of prompts in time. A prompt takes 0.05 to 0.35 s."""
    free = [0.0] * servers
    now, within, count = 0.0, 0, 20_000
    for _ in range(count):
        now += draw.expovariate(load / 0.2)
        first = min(range(servers), key=free.__getitem__)
        free[first] = max(free[first], now) + draw.uniform(0.05, 0.35)
        within += free[first] - now <= goal_s
    return within / count


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (1, 0.8), (3, 2.4), (8, 7.2)])
def test_shares_of_first_tokens_match_a_simulated_queue(servers, load):
    prompts = [(0.05 + 0.3 * n / 20, 1 / 21) for n in range(21)]
    for goal_s in (0.5, 1.0, 2.0):
        told = first_tokens_within(goal_s, prompts, load, servers)
        assert told == pytest.approx(queue(servers, load, goal_s, random.Random(2)), abs=0.06)


def test_overload():
    assert first_tokens_within(1.0, [(0.1, 1.0)], 2.0, 2) == 0.0
    assert requests_each(Gap(0.01, 0.001), 1_000.0, 1) == math.inf
    assert gaps_within(10, math.inf) == 0.0
    assert requests_each(Gap(0.01, 0.001), 500.0, 1) == pytest.approx(10)  # 10 requests, a gap of 20 ms
    assert gaps_within(10, 10) == pytest.approx(0.56, abs=0.02)  # P(Poisson(10) <= 10) is 0.58


def of(requests_per_s, prompt=400, answer=100, waiting=0):
    return Demand(requests_per_s, requests_per_s * prompt, answer, [(prompt, 1.0)], waiting)


KNOWN = Capacity(2_000.0, 1.0, Gap(0.01, 0.001), 64)


def wanted(demand, capacity=KNOWN, room=40, queued=0):
    busy = replace(member("p", P), queued_tokens=queued)
    return work(demand, capacity, [busy], GOALS).wanted(GOALS, Counts(2, 3), room)


def test_the_fewest_workers_that_meet_the_goals():
    before = Counts(0, 0)
    for rate in (0.0, 1.0, 4.0, 8.0, 16.0, 32.0):
        now = wanted(of(rate))
        assert now.prefill >= before.prefill
        assert now.decode >= before.decode
        todo = work(of(rate), KNOWN, [], GOALS)
        for counts, enough in ((now, True), (Counts(now.prefill - 1, now.decode - 1), False)):
            shares = todo.within(counts, GOALS)
            for share, number in ((shares.first_token, counts.prefill), (shares.gap, counts.decode)):
                if share is not None and number >= GOALS.prefill.least:
                    assert (share >= TARGET) is enough
        before = now
    assert wanted(of(0.0)) == Counts(1, 1)
    assert before.prefill > 6
    assert before.decode > 3


def test_the_mix_of_load_decides_which_side_grows():
    long_prompts, long_answers = wanted(of(4.0, 1_600, 20)), wanted(of(4.0, 50, 800))
    assert long_prompts.prefill > long_answers.prefill
    assert long_prompts.decode < long_answers.decode


def test_backlogs_count():
    assert wanted(of(4.0), queued=40_000).prefill > wanted(of(4.0)).prefill
    assert wanted(of(4.0, waiting=100)).prefill > wanted(of(4.0)).prefill


def test_an_unknown_side_stays():
    assert wanted(of(50.0), Capacity(None, 1.0, None, 0)) == Counts(2, 3)


def test_an_unreachable_goal_does_not_use_all_workers():
    slow = wanted(of(1.0, 4_000))  # each prompt takes 2 s
    assert slow.prefill < GOALS.prefill.most
    assert wanted(of(1.0), Capacity(2_000.0, 1.0, Gap(0.2, 0.001), 64)).decode < 4


def test_little_room_goes_to_the_side_that_needs_it_more():
    free = wanted(of(16.0))
    tight = wanted(of(16.0), room=free.prefill + free.decode - 3)
    assert tight.prefill + tight.decode == free.prefill + free.decode - 3
    todo = work(of(16.0), KNOWN, [], GOALS)
    worst = min(share for share in vars_of(todo, tight) if share is not None)
    for other in (Counts(tight.prefill - 1, tight.decode + 1), Counts(tight.prefill + 1, tight.decode - 1)):
        assert worst >= min(share for share in vars_of(todo, other) if share is not None) - 1e-9


def vars_of(todo, counts):
    shares = todo.within(counts, GOALS)
    return shares.first_token, shares.gap


SEEING = replace(KNOWN, image_tokens_per_s=10_000.0)


def encoders(rate, capacity=SEEING, present=0, most=8, queued=0):
    """Return the wanted numbers while images of 1,000 tokens arrive. An image takes 0.1 s."""
    demand = replace(of(1.0), images=[(1_000, 1.0)] if rate else [], image_tokens_per_s=1_000 * rate)
    busy = [replace(member("e", E), queued_tokens=queued)]
    own = replace(GOALS, encode=Bounds(0, most))
    return work(demand, capacity, busy, own).wanted(own, Counts(1, 1, present), 40)


def test_encode_workers_follow_the_images():
    numbers = [encoders(rate).encode for rate in (0.0, 10 * FEW - 0.1, 1.0, 10.0, 30.0, 1_000.0)]
    assert (numbers[:3], numbers) == ([0, 0, 1], sorted(numbers))
    assert 3 < numbers[-2] < numbers[-1] == 8
    assert encoders(10.0, queued=100_000).encode > encoders(10.0).encode
    assert encoders(10.0, replace(SEEING, new_images=0.1)).encode < encoders(10.0).encode
    others = {(one.prefill, one.decode) for one in (encoders(0.0), encoders(30.0, queued=100_000))}
    assert len(others) == 1


def test_one_encode_worker_shows_how_fast_they_are():
    numbers = [encoders(rate, KNOWN, there).encode for rate, there in ((0.0, 0), (9.0, 0), (9.0, 3))]
    assert numbers == [0, 1, 3]


def test_without_a_maximum_encode_workers_stay():
    assert encoders(30.0, present=2, most=0).encode == 2
    assert encoders(0.0, KNOWN, present=9, most=0).encode == 9


def test_more_workers_are_never_worse():
    todo = work(of(16.0), KNOWN, [replace(member("p", P), queued_tokens=1_000)], GOALS)
    shares = [vars_of(todo, Counts(n, n)) for n in range(1, 20)]
    for few, more in pairwise(shares):
        assert all(a is None or b is None or b >= a - 1e-12 for a, b in zip(few, more, strict=True))
