import asyncio
import itertools
import time

import pytest
from redis.exceptions import NoPermissionError

from baton.services.tenants import quotas, redis_keys, shared
from baton.services.tenants.model import ANYBODY, Caller, Limits, OverLimit, Tenant
from baton.services.tenants.quotas import Quotas, Rate, Rates, SlotLimit, Slots
from harness.scheduling import until
from harness.support import PATIENCE


def caller(key="k", tenant="acme", own=None, **limits):
    return Caller(key, tenant, Limits(**(own or {})), Tenant(**limits))


async def entered(quotas, who, count):
    found = []
    for _ in range(count):
        try:
            found.append(await quotas.enter(who))
        except OverLimit:
            continue
    return found


async def charged(visit, *tokens):
    try:
        await visit.charge(*tokens)
    except OverLimit:
        return False
    return True


@pytest.fixture
def alone():
    return Quotas(None, "r1")


async def test_processes_of_one_router_divide_a_limit_without_redis():
    both = [Quotas(None, f"r{number}", processes=2) for number in range(2)]
    who = caller(concurrency=4)
    assert [len(await entered(one, who, 10)) for one in both] == [2, 2]
    odd = caller(tenant="odd", concurrency=3)
    assert [len(await entered(one, odd, 10)) for one in both] == [2, 2]  # rounded up
    pace = Rate(both[0]._rates, "tokens_per_min", "x", 60)
    assert pace.take_here(60) is None  # a whole burst, so no request is refused forever
    wait_s = pace.take_here(30)
    assert wait_s == pytest.approx(60.0, abs=2.0)  # half of the rate


async def test_without_limits_nothing_is_refused(alone):
    visits = [*await entered(alone, ANYBODY, 200), *await entered(alone, caller(), 200)]
    assert len(visits) == 400
    for number, visit in enumerate(visits):
        await visit.charge(str(number), 10**9, 10**9)
        visit.settle(str(number), 5)
        visit.leave()


@pytest.mark.parametrize(
    ("who", "said"),
    [
        (caller(requests_per_s=3), r"tenant 'acme' is limited to 3 requests a second \(requests_per_s\)"),
        (caller(own={"concurrency": 3}), r"key 'k' is limited to 3 requests at a time \(concurrency\)"),
    ],
)
async def test_a_refusal_names_the_limit_its_value_and_whose_it_is(alone, who, said):
    assert len(await entered(alone, who, 3)) == 3
    with pytest.raises(OverLimit, match=said) as refused:  # noqa: PT012 (one may be admitted)
        for _ in range(100):
            await alone.enter(who)
    assert 0 < refused.value.retry_after_s <= 1
    assert f"({refused.value.limit})" in str(refused.value)


async def test_requests_come_back_at_their_rate(alone):
    who, began = caller(requests_per_s=20), time.monotonic()
    count = len(await entered(alone, who, 60))
    assert 20 <= count <= 20 + 20 * (time.monotonic() - began) + 1  # a burst of one second's worth
    with pytest.raises(OverLimit, match="requests_per_s") as refused:  # noqa: PT012 (one may be admitted)
        for _ in range(100):
            await alone.enter(who)
            count += 1
    assert refused.value.retry_after_s <= 0.05
    deadline = began + 10 * PATIENCE
    while (until_now := time.monotonic()) < began + 0.5 or count < 25:
        assert until_now < deadline, f"{count} were admitted"
        count += len(await entered(alone, who, 1))
        await asyncio.sleep(0.005)
    assert count <= 20 + 20 * (time.monotonic() - began) + 1


async def test_of_several_limits_all_are_taken_or_none(alone):
    who = caller(own={"concurrency": 5, "requests_per_s": 100}, requests_per_s=2)
    visits = await entered(alone, who, 50)
    assert len(visits) == 2
    other = caller("k", "other", own={"concurrency": 5, "requests_per_s": 100})  # the same key's own limits
    assert len(await entered(alone, other, 50)) == 3
    for visit in visits:
        visit.leave()
    assert len(await entered(alone, other, 50)) == 2


async def test_tokens_are_charged_before_and_corrected_after(alone):
    visit = await alone.enter(caller(tokens_per_min=1_000))
    await visit.charge("a", prompt=100, most=500)
    said = r"1000 tokens a minute \(tokens_per_min\), and this request needs 600"
    with pytest.raises(OverLimit, match=said) as no:
        await visit.charge("b", prompt=100, most=500)
    assert 11 < no.value.retry_after_s <= 12  # 200 of 1,000 tokens are missing
    visit.settle("a", 150)
    await visit.charge("b", prompt=100, most=500)  # 750 of 1,000
    await visit.charge("c", prompt=0, most=250)
    assert not await charged(visit, "d", 10, 10)
    visit.settle("b", 600)
    visit.settle("c", 0)  # it was not placed
    await visit.charge("d", prompt=100, most=148)


async def test_an_answer_that_may_be_longer_than_a_minute_s_tokens_is_charged_with_these(alone):
    visit = await alone.enter(caller(tokens_per_min=1_000))
    await visit.charge("a", prompt=100, most=128_000)
    visit.settle("a", 1_500)  # it turned out longer
    with pytest.raises(OverLimit) as no:
        await visit.charge("b", prompt=50, most=50)
    assert 35 < no.value.retry_after_s <= 36  # the excess of 500, and 100 more
    with pytest.raises(OverLimit, match="can never be admitted") as never:
        await visit.charge("c", prompt=1_001, most=1)
    assert never.value.retry_after_s == 0


async def test_two_routers_share_each_limit(redis_server, share):
    routers = [Quotas(await share(redis_server.url), f"r{number}") for number in range(2)]
    who, began = caller(requests_per_s=1, own={"concurrency": 10}), time.monotonic()
    count = len(await entered(routers[0], who, 3)) + len(await entered(routers[1], who, 3))
    assert 1 <= count <= 1 + (time.monotonic() - began)
    who = caller("many", "b", concurrency=7)
    visits = [await entered(router, who, 6) for router in routers]
    assert [len(one) for one in visits] == [6, 1]
    visits[0][0].leave()
    await until(lambda: entered(routers[1], who, 1))
    assert not await entered(routers[0], who, 2)
    who = caller("tokens", "c", tokens_per_min=600)
    one, two = [await router.enter(who) for router in routers]
    await one.charge("a", 100, 300)
    assert not await charged(two, "b", 100, 300)
    one.settle("a", 150)
    await until(lambda: charged(two, "b", 100, 300))
    assert not await charged(one, "c", 100, 1)


async def test_two_routers_hold_a_rate_together(redis_server, share):
    """Together they admit one bucket and its rate, within 5 %, under any load."""
    routers = [Quotas(await share(redis_server.url), f"r{number}") for number in range(2)]
    deadline = time.monotonic() + 10 * PATIENCE
    for round_ in itertools.count():
        admitted, asked, most = await _flood(routers, f"flood-{round_}")
        assert admitted <= most
        if asked > 2 * most and admitted >= 0.95 * most:
            return
        # On a busy machine there may be too few requests: try again.
        assert time.monotonic() < deadline, f"{admitted} of {asked} were admitted; it may be {most:.0f}"


async def _flood(routers, tenant):
    """Send requests for a second; return how many were admitted, sent, and allowed."""
    who = caller(tenant, tenant, requests_per_s=200)
    began, admitted, asked = time.monotonic(), 0, 0
    while time.monotonic() - began < 1.0:
        for router in routers:
            admitted += len(await entered(router, who, 20))
            asked += 20
        await asyncio.sleep(0.001)
    return admitted, asked, 200 + 200 * (time.monotonic() - began)


async def test_a_bucket_that_is_full_again_holds_no_more_than_it_may(redis_server, share):
    """This holds in memory and in Redis, where throttled's own number would stay in the past."""
    store = await share(redis_server.url)
    for rates in (Rates(None), Rates(store)):
        rate = Rate(rates, "tokens_per_min", "tenant:full", 600)
        assert rate.take_here(500) is None
        assert await rate.take_shared(500) is None
        rate.give_here(500)
        rate.give_here(500)  # twice, by mistake
        rate.give_shared(1_000)
        await store._later.join()
        assert rate.take_here(600) is None
        assert await rate.take_shared(600) is None
        # It refills by 10 per second; the test takes less than 10 s even on a busy machine.
        assert rate.take_here(100) is not None
        assert (await rate.take_shared(100) is None) == (rates.shared is None)
    keys = await store.client.keys("*tenant:full")
    assert [await store.client.ttl(key) for key in keys] == [pytest.approx(60, abs=2)]


async def test_the_slots_of_a_router_that_died_come_back(redis_server, share, monkeypatch):
    monkeypatch.setattr(quotas, "_LEASE_MS", 1_500)  # longer than a busy machine stalls
    monkeypatch.setattr(redis_keys, "RENEW_S", 0.05)
    dead, alive = [Quotas(await share(redis_server.url), name) for name in ("dead", "alive")]
    alive.start()
    who = caller("k", "mortal", concurrency=4)
    assert len(await entered(dead, who, 3)) == 3  # it renews nothing, as if dead
    began = time.monotonic()
    mine = await entered(alive, who, 9)
    assert len(mine) == 1

    async def all_four():
        mine.extend(await entered(alive, who, 9))
        return len(mine) == 4

    await until(all_four)
    assert time.monotonic() - began > 1.0
    await asyncio.sleep(2.0)  # longer than a lease: renewed counts stay
    third = Quotas(await share(redis_server.url), "third")
    assert not await entered(third, who, 3)
    await alive.close()


async def test_a_slot_message_that_is_lost_is_mended_by_the_next(redis_server, share):
    store = await share(redis_server.url)
    mine = Slots(store, "r1")
    limit = SlotLimit(mine, "tenant:lossy", 2)
    assert limit.take_here(1) is None
    assert await limit.take_shared(1) is None
    limit.give_here(1)  # `give_shared` is not called
    assert limit.take_here(2) is None
    assert await limit.take_shared(2) is None
    assert not await Slots(store, "r2").say("tenant:lossy", 1)


async def test_a_slot_message_that_is_overtaken_changes_nothing(redis_server, share, monkeypatch):
    """Messages use several connections: an older count must not replace a newer one, not even 0."""
    store = await share(redis_server.url)
    mine, other = Slots(store, "r1"), Slots(store, "r2")
    limit = SlotLimit(mine, "tenant:overtaken", 2)
    call, waiting = store.call, asyncio.Event()

    async def slow(make):
        monkeypatch.setattr(store, "call", call)
        await waiting.wait()
        return await call(make)

    for then, seen_by_others in ((2, 2), (0, 0)):
        waiting.clear()
        monkeypatch.setattr(store, "call", slow)
        mine.held["tenant:overtaken"] = 1
        first = asyncio.create_task(limit.take_shared(1))
        await asyncio.sleep(0)
        mine.held["tenant:overtaken"] = then
        assert await mine.say("tenant:overtaken", -1)
        waiting.set()
        assert await first is None
        assert await other.say("tenant:overtaken", seen_by_others)
        if seen_by_others:
            assert not await other.say("tenant:overtaken", seen_by_others - 1)


async def test_a_client_that_leaves_while_redis_is_asked_holds_nothing(redis_server, share):
    store = await share(redis_server.url)
    quotas = Quotas(store, "r1")
    who = caller("k", "hasty", concurrency=1)
    for _ in range(5):
        task = asyncio.create_task(quotas.enter(who))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not quotas._slots.held
    (await quotas.enter(who)).leave()


async def test_a_redis_that_takes_writes_but_refuses_calls_is_reported_once(
    own_redis, share, monkeypatch, caplog
):
    """This happens if an ACL rule is missing, for example."""
    monkeypatch.setattr(shared, "PROBE_S", 0.01)
    caplog.set_level("INFO")
    store = await share(own_redis.url)
    probed = 0

    async def refused():
        raise NoPermissionError("this user has no permissions to run the 'evalsha' command")

    async def probed_again():
        nonlocal probed
        if store.up:
            probed += 1
            await store.call(refused)
        return probed > 3

    await until(probed_again)
    told = [record.levelname for record in caplog.records if record.name == shared.log.name]
    assert told == ["ERROR"]


@pytest.mark.parametrize("how", ["killed", "hangs"])
async def test_without_redis_each_router_counts_alone(own_redis, share, how, monkeypatch, caplog):
    monkeypatch.setattr(shared, "PROBE_S", 0.05)
    monkeypatch.setattr(shared, "CALL_S", 1.0)
    caplog.set_level("INFO")
    store = await share(own_redis.url)
    quotas = Quotas(store, "r1")
    who = caller(concurrency=8, requests_per_s=1_000, tokens_per_min=1_000)
    visits = await entered(quotas, who, 2)
    await visits[0].charge("a", 300, 300)
    (own_redis.stop if how == "killed" else own_redis.hang)()
    began = time.monotonic()
    visits += await entered(quotas, who, 20)
    assert len(visits) == 8  # none failed, and the limit holds
    assert time.monotonic() - began < shared.CALL_S * 3
    await visits[0].charge("b", 200, 199)
    assert not await charged(visits[0], "c", 100, 100)
    for visit in visits:
        visit.leave()
    away = [record for record in caplog.records if "is down" in record.message]
    assert [record.levelname for record in away] == ["ERROR"]
    (own_redis.start if how == "killed" else own_redis.wake)()

    await until(lambda: store.up)
    other = Quotas(await share(own_redis.url), "r2")
    visits = await entered(quotas, who, 5)
    assert "is back" in caplog.text

    async def shared_again():
        return len(await entered(other, caller(concurrency=5), 1)) == 0

    await until(shared_again)
