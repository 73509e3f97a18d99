"""A scheduler's store while its Redis dies, hangs, fills up, refuses it, or comes back without its memory."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import StoreRefuses, StoreUnavailable
from baton.scheduler.store import open_store
from baton.scheduler.store.memory import MemoryStore
from baton.scheduler.store.redis import CALL_TIMEOUT_S, RedisStore
from baton.scheduler.store.resilient import FOLLOW_REQUESTS, QUICK_S, ResilientStore
from baton.scheduler.types import Claim, Known, Reserved, ReserveOutcome, ReserveResult, State
from harness.scheduling import LEASE_S, RedisServer, claim_on, need, register, report, until
from harness.support import PATIENCE

BOOKED = ReserveOutcome.BOOKED
READY = pb.WORKER_STATE_READY


def resilient(server: RedisServer) -> ResilientStore:
    return ResilientStore(RedisStore(server.url, "t"), MemoryStore("t"))


@pytest.fixture
async def stores(own_redis: RedisServer) -> AsyncIterator[list[ResilientStore]]:
    """Two schedulers' stores over one Redis, which the test may harm; a pair of workers."""
    made = [resilient(own_redis) for _ in range(2)]
    for store in made:
        await store.open()
    await register(made[0], "p", pb.ROLE_PREFILL)
    await register(made[0], "d", pb.ROLE_DECODE, max_num_seqs=50, num_blocks=10_000)
    for store in made:
        await store.tend()
    yield made
    for store in made:
        await store.close()


async def place(store: ResilientStore, request_id: str, epoch: int = 1) -> ReserveOutcome:
    claim = claim_on(await store.view(), need(request_id, epoch, 10), "d", "p")
    return (await store.reserve(claim, LEASE_S)).outcome


async def live(store: ResilientStore) -> set[str]:
    return {one.attempt.request_id for one in (await store.history(100)).attempts}


async def finish(store: ResilientStore, *names: str) -> None:
    await store.report(report(finished=[Attempt(name, 1) for name in names]), LEASE_S)


async def lose(store: ResilientStore, server: RedisServer) -> None:
    """Place `during` while the server, full for a moment, takes no writes."""
    admin = Redis.from_url(server.url)
    await admin.config_set("maxmemory", "1")
    assert await place(store, "during") is BOOKED
    assert store.problem
    await admin.config_set("maxmemory", "0")
    await admin.aclose()


async def back(*stores: ResilientStore) -> None:
    async def attached() -> bool:
        for store in stores:
            await store.tend()
        return not any(store.problem for store in stores)

    await until(attached)


async def test_a_killed_redis_is_missed_by_nobody(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    """Empty when it is back: it learns what ran before and during its absence, and what ended."""
    one, other = stores
    for name in ("ends", "stays"):
        assert await place(one, name) is BOOKED
    assert await place(other, "theirs") is BOOKED
    await one.tend()
    generation = one.generation
    own_redis.stop()
    assert await place(one, "during") is BOOKED
    assert "does not answer" in one.problem
    await finish(one, "ends")
    assert await place(one, "ends", 1) is ReserveOutcome.STALE
    assert await live(one) == {"stays", "theirs", "during"}  # the other's were mirrored
    assert (await one.heartbeat("d", READY, pb.WorkerLoad(), LEASE_S)).known
    own_redis.start()
    await back(one)
    assert one.generation != generation
    await back(other)
    assert await live(other) == {"stays", "theirs", "during"}
    view = await other.view()
    assert view.workers["d"].reserved == Reserved(0, 3, 3 * 2)
    assert await place(other, "stays", 1) is ReserveOutcome.STALE
    await finish(other, "stays", "theirs", "during")
    for store in stores:
        assert all(worker.reserved == Reserved() for worker in (await store.view()).workers.values())


async def test_a_booking_whose_reply_is_lost_is_made_once(
    stores: list[ResilientStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has booked it, and it was followed from there, when Redis is lost."""
    one, other = stores
    reserve = RedisStore.reserve

    async def unanswered(shared: RedisStore, claim: Claim, lease_s: float) -> ReserveResult:
        assert (await reserve(shared, claim, lease_s)).outcome is BOOKED
        await one.tend()
        raise StoreUnavailable("the reply was lost")

    with monkeypatch.context() as patched:
        patched.setattr(RedisStore, "reserve", unanswered)
        assert await place(one, "r") is BOOKED
    assert one.problem
    await back(one)
    assert await live(other) == {"r"}
    view = await other.view()
    assert view.workers["d"].reserved == Reserved(0, 1, 2)


async def test_a_call_that_comes_twice_is_stale_also_without_redis(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    one, _ = stores
    own_redis.stop()
    assert await place(one, "r") is BOOKED
    assert one.problem
    assert await place(one, "r") is ReserveOutcome.STALE


async def test_a_hung_redis_costs_one_call(own_redis: RedisServer, stores: list[ResilientStore]) -> None:
    one, other = stores
    own_redis.hang()
    began = time.monotonic()
    placed = await asyncio.gather(*(place(one, f"r{number}") for number in range(20)))
    assert time.monotonic() - began < CALL_TIMEOUT_S + 1.0 * PATIENCE  # 18 s, if each waited for its own
    assert set(placed) == {BOOKED}
    began = time.monotonic()
    assert await place(one, "next") is BOOKED
    assert time.monotonic() - began < CALL_TIMEOUT_S / 2
    await one.tend()
    assert one.problem
    own_redis.wake()  # its memory is as it was, and calls that it did not answer may have run
    await back(one)
    assert await live(other) == {*(f"r{number}" for number in range(20)), "next"}
    await finish(one, *(f"r{number}" for number in range(20)), "next")
    assert (await other.view()).workers["d"].reserved == Reserved()


async def test_leases_that_ran_out_unheard_are_revived(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    one, other = stores
    claim = claim_on(await one.view(), need("long", 1, 10), "d", "p")
    await one.reserve(claim, 0.05)
    await one.tend()
    admin = Redis.from_url(own_redis.url)
    await admin.config_set("maxmemory", "1")
    await one.report(report(renewed=[Attempt("long", 1)]), LEASE_S)
    assert one.problem
    await admin.config_set("maxmemory", "0")
    await admin.aclose()

    async def swept() -> bool:
        return not (await other.view()).live_attempts

    await until(swept)  # by one who knows no better
    await back(one)
    assert await live(other) == {"long"}
    assert (await other.view()).workers["d"].reserved == Reserved(0, 1, 2)


async def test_a_full_redis_is_left_alone_until_it_takes_writes(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    one, other = stores
    admin = Redis.from_url(own_redis.url)
    await admin.config_set("maxmemory", "1")
    assert await place(one, "r") is BOOKED
    assert "is full" in one.problem
    await one.tend()  # it reads, but does not write
    assert one.problem
    assert await place(one, "s") is BOOKED
    await admin.config_set("maxmemory", "0")
    await back(one, other)
    assert await live(other) == {"r", "s"}
    await admin.aclose()


async def test_who_only_reads_notices_that_redis_is_full(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    """Or it would take the work of those that say so, and see all workers' leases run out."""
    _, other = stores
    admin = Redis.from_url(own_redis.url)
    await admin.config_set("maxmemory", "1")
    await other.tend()
    assert "is full" in other.problem
    assert set((await other.view()).workers) == {"p", "d"}
    await admin.config_set("maxmemory", "0")
    await back(other)
    await admin.aclose()


async def test_what_another_scheduler_hears_of_an_end_outweighs_a_memory(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    """One lost Redis alone, and routers went on to the next, which had not heard of what that one placed."""
    one, other = stores
    admin = Redis.from_url(own_redis.url)
    await admin.config_set("maxmemory", "1")
    for name in ("ends", "stays"):
        assert await place(one, name) is BOOKED
    await admin.config_set("maxmemory", "0")
    await admin.aclose()
    assert one.problem
    assert not other.problem
    await finish(other, "ends")
    await back(one)
    assert await live(one) == await live(other) == {"stays"}


async def test_a_changed_password(own_redis: RedisServer, stores: list[ResilientStore]) -> None:
    one, other = stores
    admin = Redis.from_url(own_redis.url)
    await admin.config_set("requirepass", "changed")
    await admin.client_kill_filter(_type="normal", skipme=True)
    assert await place(one, "r") is BOOKED
    await one.tend()
    assert "refused the password" in one.problem
    assert "scheduler.store" in one.problem
    await admin.config_set("requirepass", "")
    await back(one, other)
    assert await live(other) == {"r"}
    await admin.aclose()


async def test_an_emptied_redis_is_noticed_though_it_was_never_away(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    one, other = stores
    assert await place(one, "r") is BOOKED
    admin = Redis.from_url(own_redis.url)
    await admin.flushall()
    await admin.aclose()
    assert set((await one.view()).workers) == {"p", "d"}
    assert "has lost what it held" in one.problem
    assert await place(one, "s") is BOOKED
    await back(one, other)  # each fills in what it knows
    assert one.generation == other.generation
    assert await live(other) == {"r", "s"}
    assert (await one.view()).workers["d"].reserved == Reserved(0, 2, 4)


async def test_two_schedulers_write_back_what_each_of_them_did(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    one, other = stores
    assert await place(one, "before") is BOOKED
    await other.tend()
    own_redis.stop()
    for number, store in enumerate(stores):
        assert await place(store, f"during{number}") is BOOKED
    await finish(one, "before")
    own_redis.start()
    await back(*reversed(stores))
    for store in stores:
        assert await live(store) == {"during0", "during1"}
        assert (await store.view()).workers["d"].reserved == Reserved(0, 2, 4)


async def test_requests_go_on_while_it_is_written_back(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    """Placed and ended around the moment in which Redis decides again: nothing is left over, nothing lost."""
    one, other = stores
    own_redis.stop()
    kept: list[str] = []

    async def load(number: int) -> None:
        for turn in range(25):
            name = f"{number}.{turn}"
            if await place(one, name) is not BOOKED:
                continue
            await asyncio.sleep(0)
            if turn % 5:
                await finish(one, name)
            else:
                kept.append(name)

    running = [asyncio.create_task(load(number)) for number in range(4)]
    own_redis.start()
    await back(one)
    await asyncio.gather(*running)
    assert await live(one) == await live(other) == set(kept)
    await finish(one, *kept)
    view = await other.view()
    assert all(worker.reserved == Reserved() for worker in view.workers.values())


async def test_requests_wait_for_what_has_changed_while_it_was_written_back_and_not_for_all(
    own_redis: RedisServer, stores: list[ResilientStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stores
    own_redis.stop()
    assert await place(one, "during") is BOOKED
    await one.report(report(finished=[Attempt(f"r{number}", 1) for number in range(3_000)]), LEASE_S)
    own_redis.start()
    merged: list[tuple[bool, int]] = []
    merge = RedisStore.merge

    async def counted(store: RedisStore, state: State) -> str:
        merged.append((one._decided.is_set(), len(state.requests)))
        return await merge(store, state)

    monkeypatch.setattr(RedisStore, "merge", counted)
    await one.tend()
    assert not one.problem
    assert merged == [(True, 0), (True, 3_001), (False, 1)]  # the first: is it well?
    await other.tend()  # it finds another Redis than it knew
    await back(other)
    await other.tend()
    assert len((await other.export()).requests) == 3_001
    assert await live(other) == {"during"}


async def test_a_redis_that_only_stood_still_gets_what_happened_meanwhile_and_not_all(
    own_redis: RedisServer, stores: list[ResilientStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a second without an answer would cost several: 30,000 requests are known at 500 a second."""
    one, other = stores
    await one.report(report(finished=[Attempt(f"r{number}", 1) for number in range(3_000)]), LEASE_S)
    for _ in range(2):
        await one.tend()
    own_redis.hang()
    assert await place(one, "during") is BOOKED
    await finish(one, "ended")
    own_redis.wake()
    merged: list[int] = []
    merge = RedisStore.merge

    async def counted(store: RedisStore, state: State) -> str:
        merged.append(len(state.requests))
        return await merge(store, state)

    with monkeypatch.context() as patched:
        patched.setattr(RedisStore, "merge", counted)
        await back(one)
    assert sum(merged) <= 4
    assert await live(other) == {"during"}
    await other.tend()
    assert len((await other.export()).requests) == 3_002


async def test_a_redis_that_comes_back_with_an_older_state_gets_all(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    """It has the same generation, and lacks what it had not written to disk."""
    one, other = stores
    assert await place(one, "old") is BOOKED
    admin = Redis.from_url(own_redis.url)
    dumped = {key: await admin.dump(key) for key in await admin.keys("*")}
    await finish(one, "old")
    assert await place(one, "new") is BOOKED
    for _ in range(3):
        await one.tend()
    own_redis.hang()
    assert await place(one, "during") is BOOKED
    own_redis.wake()
    await admin.flushall()
    for key, value in dumped.items():
        await admin.restore(key, 60_000, value)
    assert await live(other) == {"old"}
    await back(one)
    assert await live(other) == {"new", "during"}
    await admin.aclose()


async def test_it_comes_back_however_much_others_did_meanwhile(
    own_redis: RedisServer, stores: list[ResilientStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To catch up takes as long as it takes: it says nothing of how well Redis is."""
    one, other = stores
    await lose(one, own_redis)
    export = RedisStore.export

    async def long_export(store: RedisStore, since: int = 0) -> State:
        state = await export(store, since)
        await asyncio.sleep(2 * QUICK_S)  # as tens of thousands of changes need
        return state

    monkeypatch.setattr(RedisStore, "export", long_export)
    await other.merge(State(requests=tuple(Known(Attempt(f"r{n}", 1), over=True) for n in range(3_000))))
    assert await place(other, "theirs") is BOOKED
    await back(one)
    assert await live(one) == {"during", "theirs"}
    await one.tend()
    assert len((await one.export()).requests) == 3_002


async def test_it_stays_away_while_a_small_write_takes_long(
    own_redis: RedisServer, stores: list[ResilientStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = stores
    await lose(one, own_redis)
    merge = RedisStore.merge

    async def slow_merge(store: RedisStore, state: State) -> str:
        await asyncio.sleep(2 * QUICK_S)
        return await merge(store, state)

    with monkeypatch.context() as patch:
        patch.setattr(RedisStore, "merge", slow_merge)
        await one.tend()
        assert one.problem
    await back(one)


async def test_following_costs_what_has_changed_and_not_all_that_is_known(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    one, other = stores
    await other.merge(State(requests=tuple(Known(Attempt(f"r{n}", 1), over=True) for n in range(3_000))))
    await one.tend()
    admin = Redis.from_url(own_redis.url)

    async def sent() -> int:
        return int((await admin.info("stats"))["total_net_output_bytes"])

    for name in ("a", "b"):
        assert await place(other, name) is BOOKED
        before = await sent()
        await one.tend()
        assert await sent() - before < 20_000  # all of them are 60,000 and more
        own = {known.attempt.request_id for known in (await one.export()).requests if known.booking}
        assert name in own
    await other.report(report(prefilled=[Attempt("a", 1)], finished=[Attempt("b", 1)]), LEASE_S)
    await one.tend()
    assert {n.attempt.request_id: n.prefilled for n in (await one.export()).requests if n.booking} == {
        "a": True
    }
    assert len((await one.export()).requests) == 3_002
    await admin.aclose()


async def test_other_calls_go_on_while_it_follows(
    own_redis: RedisServer, stores: list[ResilientStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand changes are parsed and merged in pieces: a placement does not wait for all of them."""
    one, other = stores
    await other.merge(State(requests=tuple(Known(Attempt(f"r{n}", 1), over=True) for n in range(2_000))))
    merge, turns, merged = MemoryStore.merge, 0, list[tuple[int, int]]()

    async def counted(store: MemoryStore, state: State) -> str:
        merged.append((turns, len(state.requests)))
        return await merge(store, state)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(MemoryStore, "merge", counted)
    going = asyncio.create_task(others())
    await one.tend()
    going.cancel()
    assert sum(requests for _, requests in merged) == 2_000
    assert max(requests for _, requests in merged) <= FOLLOW_REQUESTS
    assert len({turn for turn, requests in merged if requests}) == sum(
        bool(requests) for _, requests in merged
    )
    assert len((await one.export()).requests) == 2_000


async def test_a_drain_outlives_redis_and_so_does_its_end(
    own_redis: RedisServer, stores: list[ResilientStore]
) -> None:
    one, other = stores
    for name in ("d", "p"):
        assert await one.drain(name)
    await other.tend()
    own_redis.hang()
    assert await other.drain("p", undo=True)
    own_redis.wake()  # it has not heard of that
    await back(other, one)
    for store in stores:
        assert (await store.view()).drained == {"d"}
    own_redis.stop()
    own_redis.start()  # and knows nothing
    await back(one, other)
    for store in stores:
        assert (await store.view()).drained == {"d"}


@pytest.mark.parametrize("how", ["dead", "hung"])
async def test_it_begins_without_its_database(
    own_redis: RedisServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory decides from the start; what Redis knows, and what happened meanwhile, is joined later."""
    earlier = resilient(own_redis)
    await earlier.open()
    await register(earlier, "d", pb.ROLE_MIXED, max_num_seqs=50, num_blocks=10_000)
    claim = claim_on(await earlier.view(), need("before", 1, 10), "d")
    assert (await earlier.reserve(claim, LEASE_S)).outcome is BOOKED
    await earlier.close()
    if how == "dead":
        own_redis.stop()
    else:
        own_redis.hang()
    store = resilient(own_redis)
    await store.open()
    assert "does not answer" in store.problem
    assert "beginning without the store" in caplog.text
    assert not (await store.view()).workers
    await register(store, "d", pb.ROLE_MIXED, max_num_seqs=50, num_blocks=10_000)
    claim = claim_on(await store.view(), need("during", 1, 10), "d")
    assert (await store.reserve(claim, LEASE_S)).outcome is BOOKED
    await store.tend()
    assert store.problem
    if how == "dead":
        own_redis.start()
    else:
        own_redis.wake()
    await back(store)
    known = {"during"} if how == "dead" else {"before", "during"}
    await store.tend()
    assert await live(store) == known
    later = resilient(own_redis)
    await later.open()
    assert await live(later) == known
    assert (await later.view()).workers["d"].reserved.requests == len(known)
    for one in (store, later):
        await one.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://:wrong@127.0.0.1:{port}/0", "refused the password"),
        ("redis://127.0.0.1:{port}/0", "refused the password"),
        ("redis://:s3cret@127.0.0.1:{port}/99", "DB index"),
    ],
    ids=["wrong password", "no password", "no such database"],
)
async def test_it_does_not_begin_where_waiting_is_no_help(
    redis_server: RedisServer, url: str, text: str
) -> None:
    store = open_store(url.format(port=redis_server.port), "t")
    with pytest.raises(StoreRefuses, match=f"(?i){text}"):
        await store.open()
    await store.close()


@pytest.mark.parametrize(("number", "refuses"), [(socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)])
async def test_a_name_that_is_nobodys_stops_the_start_and_one_unknown_for_now_does_not(
    monkeypatch: pytest.MonkeyPatch, number: int, refuses: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "it is not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    store = open_store("redis://a-host:6379/0", "t")
    if refuses:
        with pytest.raises(StoreRefuses, match=r"a-host:6379 does not answer .*not known"):
            await store.open()
    else:
        await store.open()
        assert "not known" in store.problem
    await store.close()
