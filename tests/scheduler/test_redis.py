"""Failures of the Redis store alone: passwords, TLS, a server that dies, keys that stay."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from baton.attempts import EPOCH_KEEP_S, Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.errors import StoreUnavailable
from baton.scheduler.keys import DRAINS_TTL_MS, TOPIC_TTL_MS, topic_keys
from baton.scheduler.store import open_store, redis_fleet
from baton.scheduler.store import redis as redis_module
from baton.scheduler.store.redis import CALL_TIMEOUT_S, RedisStore
from baton.scheduler.store.redis_calls import ScriptCalls, _Call
from baton.scheduler.types import FleetView, Reserved, ReserveOutcome, State
from harness.scheduling import LEASE_S, RedisServer, claim_on, free_port, need, register, report, until


async def problem(url: str) -> str:
    store = RedisStore(url, "t")
    try:
        with pytest.raises(StoreUnavailable) as caught:
            await store.view()
        return str(caught.value)
    finally:
        await store.close()


@pytest.mark.parametrize(
    "url",
    [
        *(
            "postgres://:s3cret@host",
            "redis://host:port/0",
            "nowhere",
            ":s3cret@host:6379",
            "redis:/:s3cret@h",
        ),
        *(
            "redis://:s3cret/x@host:6379/0",
            "redis://:s3cret:6379/0",
            "redis://:[s3cret@host",
            "redis://[s3cret",
        ),
    ],
)
async def test_a_wrong_url_is_named(url: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"scheduler\.store") as caught:
        open_store(url, "t")
    assert "s3cret" not in str(caught.value)


async def test_a_wrong_password_is_said(redis_server: RedisServer) -> None:
    for url in (
        f"redis://:wr0ng@127.0.0.1:{redis_server.port}/0",
        f"redis://127.0.0.1:{redis_server.port}/0",
    ):
        text = await problem(url)
        assert text.startswith(f"redis at 127.0.0.1:{redis_server.port} refused the password")
        assert "wr0ng" not in text


async def test_a_server_that_quotes_the_password_is_not(tmp_path: Path) -> None:
    """One that knows neither HELLO nor AUTH repeats their arguments."""
    without = (("--rename-command", name, "") for name in ("AUTH", "HELLO"))
    server = RedisServer(tmp_path, extra=tuple(word for words in without for word in words))
    server.start()
    try:
        text = await problem(f"redis://:s3cret@127.0.0.1:{server.port}/0")
    finally:
        server.stop()
    assert "with args beginning with" in text
    assert "s3cret" not in text


async def test_a_password_of_its_own_is_used(redis_server: RedisServer) -> None:
    """The password may come from a file, beside a URL without one."""
    store = RedisStore(f"redis://127.0.0.1:{redis_server.port}/0", "t", redis_server.password)
    try:
        assert (await store.view()).workers == {}
    finally:
        await store.close()


async def test_nobody_there_is_said() -> None:
    text = await problem(f"redis://127.0.0.1:{free_port()}/0")
    assert "does not answer" in text


async def test_a_silent_server_is_given_up_within_a_second() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client hangs up
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    began = time.monotonic()
    assert "does not answer in time" in await problem(f"redis://127.0.0.1:{port}/0")
    assert time.monotonic() - began < CALL_TIMEOUT_S + 0.2
    server.close()
    await server.wait_closed()


async def test_a_paused_server_is_given_up_and_comes_back(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, "t")
    await register(store, "m")
    admin = Redis.from_url(own_redis.url)
    await admin.client_pause(1_600)
    began = time.monotonic()
    calls = await asyncio.gather(*(store.view() for _ in range(40)), return_exceptions=True)
    assert time.monotonic() - began < CALL_TIMEOUT_S + 0.3
    assert all(isinstance(one, StoreUnavailable) for one in calls)
    await admin.ping()  # answers when the pause is over
    assert set((await store.view()).workers) == {"m"}
    await admin.aclose()
    await store.close()


async def test_calls_made_side_by_side_share_round_trips_and_none_of_their_errors(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore(own_redis.url, "t")
    await register(store, "m", num_blocks=10_000, max_num_seqs=100)
    batches: list[list[str]] = []
    run = ScriptCalls._run

    async def counted(calls: ScriptCalls, batch: Sequence[_Call]) -> list[Any]:
        batches.append([call.script for call in batch])
        return await run(calls, batch)

    monkeypatch.setattr(ScriptCalls, "_run", counted)
    admin = Redis.from_url(own_redis.url)
    await admin.script_flush()  # as after a restart: the scripts are loaded again, and no call runs twice
    view = await store.view()
    claims = [claim_on(view, need(f"r{number}", prompt=1, new=1), "m") for number in range(50)]
    wrong = asyncio.create_task(store._run("reserve", "r", "no epoch"))
    left = asyncio.create_task(store.reserve(claim_on(view, need("left", prompt=1, new=1), "m"), LEASE_S))
    await asyncio.sleep(0)
    left.cancel()
    batches.clear()
    made = await asyncio.gather(*(store.reserve(one, LEASE_S) for one in claims))
    assert {one.outcome for one in made} == {ReserveOutcome.BOOKED}
    assert len(batches) <= 3
    with pytest.raises(StoreUnavailable, match="refused a command"):
        await wrong
    assert {one.attempt.request_id for one in (await store.history(100)).attempts} == {
        f"r{number}" for number in range(50)
    }
    await admin.aclose()
    await store.close()


async def test_a_server_that_was_killed_comes_back_empty(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, "t")
    await register(store, "m", num_blocks=100)
    claim = claim_on(await store.view(), need(), "m")
    assert (await store.reserve(claim, LEASE_S)).outcome is ReserveOutcome.BOOKED
    own_redis.stop()
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await store.view()
    own_redis.start()
    assert not (await store.view()).workers  # the scripts are loaded again as well
    assert not (await store.heartbeat("m", pb.WORKER_STATE_READY, pb.WorkerLoad(), LEASE_S)).known
    assert (await store.report(report(renewed=[claim.attempt]), LEASE_S)).lost == [claim.attempt]
    # The identities that were read before the crash are not believed.
    await register(store, "m", num_blocks=50)
    worker = (await store.view()).workers["m"]
    assert worker.capacity.num_blocks == 50
    assert worker.reserved == Reserved()
    await store.close()


async def test_every_key_has_the_prefix_and_a_time_to_live(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, "t")
    await register(store, "p", pb.ROLE_PREFILL)
    await register(store, "d", pb.ROLE_DECODE)
    await store.heartbeat("d", pb.WORKER_STATE_READY, pb.WorkerLoad(), LEASE_S)
    view = await store.view()
    for name in ("one", "two", "three"):
        await store.reserve(claim_on(view, need(name), "d", "p"), LEASE_S)
    await store.report(report(finished=[Attempt("one", 1)], prefilled=[Attempt("two", 1)]), LEASE_S)
    await store.drain("d")
    await store.take_turn("balance", LEASE_S)
    await store.tell("fleet", "f", b"here", LEASE_S)
    await store.order(await store.lead("me", LEASE_S), {"f": b"orders"})
    await store.deregister("p")
    await store.merge(State())
    admin = Redis.from_url(own_redis.url)
    keys = {key.decode() for key in await admin.keys("*")}
    assert keys == set(topic_keys("t"))
    assert all(key.startswith("baton:{t}:") for key in keys)
    for key in keys:
        longest = DRAINS_TTL_MS if key.endswith(":drains") else TOPIC_TTL_MS
        assert longest / 2 < await admin.pttl(key) <= longest, key
    await admin.aclose()
    await store.close()


async def test_epochs_are_forgotten_in_time_but_not_those_of_live_attempts(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, "t")
    admin = Redis.from_url(own_redis.url)
    await register(store, "m")
    view = await store.view()
    await store.reserve(claim_on(view, need(epoch=1), "m"), LEASE_S)
    await store.report(report(finished=[Attempt("r", 1)]), LEASE_S)
    seconds, _ = await admin.time()
    forget_at = await admin.zscore("baton:{t}:epoch:leases", "r")
    assert seconds * 1_000 < forget_at <= seconds * 1_000 + 1_000 * (1 + EPOCH_KEEP_S)
    await store.reserve(claim_on(view, need(epoch=2), "m"), LEASE_S)
    assert await admin.zscore("baton:{t}:epoch:leases", "r") is None
    await store.report(report(finished=[Attempt("r", 2)]), LEASE_S)
    await admin.zadd("baton:{t}:epoch:leases", {"r": 1})  # as if the time had passed
    await store.view()
    assert not await admin.hgetall("baton:{t}:epochs")
    await admin.aclose()
    await store.close()


async def test_topics_do_not_see_each_other(own_redis: RedisServer) -> None:
    one, two = RedisStore(own_redis.url, "one"), RedisStore(own_redis.url, "two")
    await register(one, "m", fingerprint="f1")
    await register(two, "m", fingerprint="f2")
    await one.reserve(claim_on(await one.view(), need(), "m"), LEASE_S)
    assert (await two.view()).workers["m"].reserved == Reserved()
    await one.close()
    await two.close()


def shown(view: FleetView) -> dict[str, tuple[object, ...]]:
    """Return all of a view but the times that are left."""
    return {
        key: (one.identity, one.state, one.load, one.reserved, one.drain_asked, one.placeable)
        for key, one in view.workers.items()
    }


async def test_views_of_what_changed_are_as_those_of_all(own_redis: RedisServer) -> None:
    draw = random.Random(7)
    store = RedisStore(own_redis.url, "t")
    names = [f"w{number}" for number in range(5)]
    booked: list[Attempt] = []
    changes = 0
    for step in range(400):
        name, what = draw.choice(names), draw.random()
        if what < 0.08:
            await register(store, name, draw.choice((pb.ROLE_MIXED, pb.ROLE_DECODE)))
        elif what < 0.3:
            load, state = pb.WorkerLoad(running=step), draw.choice(pb.WorkerState.values()[1:])
            await store.heartbeat(name, state, load, draw.choice((LEASE_S, 0.005)))
        elif what < 0.34:
            await store.deregister(name)
        elif what < 0.38:
            await store.drain(name, undo=draw.random() < 0.7)
        elif what < 0.75:
            view = await store.view()
            if name in view.workers:
                wanted = claim_on(view, need(f"r{step}"), name)
                lease_s = draw.choice((LEASE_S, LEASE_S, 0.005))
                if (await store.reserve(wanted, lease_s)).outcome is ReserveOutcome.BOOKED:
                    booked.append(wanted.attempt)
        elif booked:
            attempt = booked.pop(draw.randrange(len(booked)))
            await store.report(report(prefilled=[attempt]), LEASE_S)
            if draw.random() < 0.8:
                await store.report(report(finished=[attempt]), LEASE_S)
        other = RedisStore(own_redis.url, "t")  # it has seen nothing, and reads all

        async def equal(other: RedisStore = other) -> bool:  # a lease may end between the two views
            mine = await store.view()
            theirs = await other.view()
            same = shown(mine) == shown(theirs)
            return same and mine.of(pb.ROLE_MIXED) == [
                one for one in mine.workers.values() if one.role == pb.ROLE_MIXED
            ]

        await until(equal)
        await other.close()
        changes += store._fleet.since > 0
    assert changes > 390  # but for the first one, none was due to read all
    await store.close()


async def test_a_view_carries_what_changed_alone(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, "t")
    for number in range(20):
        await register(store, f"w{number}")
        await store.heartbeat(f"w{number}", pb.WORKER_STATE_READY, pb.WorkerLoad(), LEASE_S)
    await store.view()
    told: list[list[bytes]] = []
    run = store._run

    async def noting(name: str, *arguments: str | int | bytes) -> Any:
        reply = await run(name, *arguments)
        if name == "view":
            told.append(reply[8])
        return reply

    store._run = noting  # type: ignore[method-assign]
    view = await store.view()
    assert len(view.workers) == 20
    await store.heartbeat("w3", pb.WORKER_STATE_READY, pb.WorkerLoad(running=7), LEASE_S)
    told.clear()
    running = {key: one.load.running for key, one in (await store.view()).workers.items() if one.load}
    assert running == dict.fromkeys(running, 0) | {"w3": 7}
    assert told == [[b"w3"]]
    await store.close()


async def test_a_server_that_lost_all_is_read_whole(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, "t")
    await register(store, "before")
    assert set((await store.view()).workers) == {"before"}
    admin = Redis.from_url(own_redis.url)
    await admin.flushall()
    await admin.aclose()
    assert not (await store.view()).workers
    await register(store, "after")
    assert set((await store.view()).workers) == {"after"}
    await store.close()


async def test_evicted_keys_do_no_lasting_harm(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_fleet, "WHOLE_S", 0.0)  # what an eviction took shows in a view of all
    store = RedisStore(own_redis.url, "t")
    await register(store, "m")
    await store.reserve(claim_on(await store.view(), need("a"), "m"), LEASE_S)
    await store.reserve(claim_on(await store.view(), need("b"), "m"), 0.001)
    admin = Redis.from_url(own_redis.url)
    await admin.delete(*(key for key in topic_keys("t") if "reserved" in key))
    await store.report(report(finished=[Attempt("a", 1)]), LEASE_S)
    assert (await store.view()).workers["m"].reserved == Reserved()
    await store.reserve(claim_on(await store.view(), need("c"), "m"), 0.001)
    await admin.delete("baton:{t}:attempts")

    async def swept() -> bool:
        return bool((await store.view()).expired)

    await until(swept)
    assert (await store.view()).expired == 0  # once is enough, though the attempt itself was gone
    await admin.delete("baton:{t}:worker:states")
    assert not (await store.view()).workers
    assert (await store.heartbeat("m", pb.WORKER_STATE_READY, pb.WorkerLoad(), LEASE_S)).known
    assert (await store.view()).workers["m"].placeable
    await admin.delete("baton:{t}:worker:identities")
    assert not (await store.heartbeat("m", pb.WORKER_STATE_READY, pb.WorkerLoad(), LEASE_S)).known
    await register(store, "m")
    assert set((await store.view()).workers) == {"m"}
    await admin.aclose()
    await store.close()


async def test_what_changed_since_is_told_in_pieces_and_all_where_a_part_is_lost(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "EXPORT_REQUESTS", 3)
    store = RedisStore(own_redis.url, "t")
    await register(store, "m")
    names = [f"r{number}" for number in range(8)]
    for name in names:
        assert (await reserve(store, name)) is ReserveOutcome.BOOKED
    everything = await store.export()
    assert [known.attempt.request_id for known in everything.requests] == names

    async def changed(since: int) -> set[str]:
        return {known.attempt.request_id for known in (await store.export(since)).requests}

    assert await changed(everything.revision) == set()
    one = Attempt("r1", 1)
    for told in (report(prefilled=[one]), report(renewed=[one]), report(finished=[one])):
        revision = (await store.export()).revision
        await store.report(told, LEASE_S)
        assert await changed(revision) == {"r1"}
    assert await changed(everything.revision + 1_000) == set(names)  # more than it has seen itself
    admin = Redis.from_url(own_redis.url)
    await admin.zadd("baton:{t}:epoch:leases", {"r1": 1})  # as if its time had passed
    await store.view()
    assert await admin.zscore("baton:{t}:changes", "r1") is None
    await admin.aclose()
    await store.close()


async def reserve(store: RedisStore, name: str) -> ReserveOutcome:
    view = await store.view()
    return (await store.reserve(claim_on(view, need(name, prompt=1, new=1), "m"), LEASE_S)).outcome


@pytest.fixture
def tls_redis(tmp_path: Path) -> Iterator[RedisServer]:
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=30
    )
    extra = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    server = RedisServer(tmp_path, extra=extra, tls=True)
    server.start()
    yield server
    server.stop()


async def test_tls(tls_redis: RedisServer, tmp_path: Path) -> None:
    store = RedisStore(f"{tls_redis.url}?ssl_ca_certs={tmp_path / 'server.crt'}", "t")
    await register(store, "m")
    assert set((await store.view()).workers) == {"m"}
    await store.close()
    assert "certificate" in await problem(tls_redis.url)  # not signed by anyone we trust
