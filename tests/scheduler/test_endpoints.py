"""The choice among several schedulers that hang, die and come back."""

import asyncio
import random
import time
from collections import Counter

import psutil
import pytest

from baton.protos import scheduler_pb2 as pb
from baton.rpc import aio_server, listen
from baton.scheduler import exchange
from baton.scheduler.client import SchedulerClient
from baton.scheduler.endpoints import CHECK_S, Endpoint, owner
from baton.scheduler.errors import SchedulerUnavailable
from baton.scheduler.service import SchedulerServer
from harness.scheduling import Options, free_port, identity, place, until
from harness.support import CALL_S, PATIENCE, freeze
from tests.scheduler.conftest import scheduler_process


@pytest.fixture
async def elsewhere():
    """Return a scheduler's process and address."""
    async with scheduler_process() as (process, address):
        yield psutil.Process(process.pid), address


@pytest.fixture
async def router(elsewhere):
    async with SchedulerClient(elsewhere[1], router_id="router") as made:
        await made.refresh()
        yield made


async def test_only_misses_in_a_row_make_a_scheduler_dead(elsewhere, router):
    process, _ = elsewhere
    for _ in range(3):  # concurrent calls count as one miss
        freeze(process.pid)
        missed = await asyncio.gather(*(router.refresh() for _ in range(20)), return_exceptions=True)
        process.resume()
        assert {type(one) for one in missed} == {SchedulerUnavailable}
        assert router.answering
        await asyncio.gather(*(router.describe() for _ in range(3)))
        assert router.answering
    freeze(process.pid)
    with pytest.raises(SchedulerUnavailable):
        await router.refresh()
    await until(lambda: not router.answering)  # no other call is needed
    process.resume()
    await router.describe()
    assert router.answering
    process.kill()
    await until(lambda: not process.is_running())
    with pytest.raises(SchedulerUnavailable):
        await router.refresh()
    assert not router.answering  # at once


async def test_another_version_is_reported():
    server = aio_server()  # it serves no methods
    address = f"127.0.0.1:{listen(server, 'scheduler.address', '127.0.0.1:0')}"
    await server.start()
    async with SchedulerClient(address, router_id="router") as made:
        with pytest.raises(SchedulerUnavailable, match="run the same version"):
            await place(made, "r", 1, 1, 1)
        with pytest.raises(SchedulerUnavailable, match="is older and knows no gangs: upgrade it first"):
            await made.leader_of("decode-0")
        assert made.answering, "it has answered"
    await server.stop(None)


async def test_a_placement_at_a_hanging_scheduler_times_out(elsewhere, router, monkeypatch):
    """A late answer is not taken for the next message's."""
    process, _ = elsewhere
    await router.register(identity("m"), pb.WORKER_STATE_READY)
    await place(router, "before", 1, 1, 1)
    monkeypatch.setattr(exchange, "PLACE_TIMEOUT_S", 0.5)
    freeze(process.pid)
    began = time.monotonic()
    with pytest.raises(SchedulerUnavailable, match="Deadline Exceeded"):
        await place(router, "late", 1, 1, 1)
    assert time.monotonic() - began < 0.5 + PATIENCE
    monkeypatch.setattr(exchange, "PLACE_TIMEOUT_S", CALL_S)
    process.resume()
    assert (await place(router, "after", 1, 1, 1)).attempt.request_id == "after"


NAMES = [f"request-{number}" for number in range(40)]


def homes(client):
    """Return the schedulers that own keys. This also makes the client check them."""
    return {client.home(name) for name in NAMES}


async def all_at(client, *wanted):
    await until(lambda: homes(client) == set(wanted), 15)


async def test_a_dead_scheduler_gets_its_keys_back_after_a_while(monkeypatch):
    """A restarted scheduler must first learn of workers and bookings."""
    monkeypatch.setattr("baton.scheduler.endpoints.BACK_S", 1.0)
    loop = asyncio.get_running_loop()
    options = Options(f"127.0.0.1:{free_port()}")
    async with (
        SchedulerServer(Options()) as other,
        SchedulerClient(f"{options.address},{other.address}", router_id="router") as client,
    ):
        async with SchedulerServer(options):
            await all_at(client, options.address, other.address)
        await all_at(client, other.address)
        async with SchedulerServer(options):
            first = client._schedulers.at(options.address)

            async def answers():
                homes(client)
                return first.answering

            await until(answers)
            answered = loop.time()
            while True:
                picked = homes(client), client.home("")
                if first.settled:
                    break
                assert picked == ({other.address}, other.address)
                await asyncio.sleep(0.01)
            assert loop.time() - answered > 0.5
            await all_at(client, options.address, other.address)
    async with SchedulerClient(options.address) as alone:
        with pytest.raises(SchedulerUnavailable):
            await alone.describe()
        assert alone.home("") == options.address  # the only one


async def test_a_scheduler_that_answers_calls_is_not_checked():
    loop = asyncio.get_running_loop()
    async with (
        SchedulerServer(Options()) as server,
        SchedulerServer(Options()) as other,
        SchedulerClient(f"{server.address},{other.address}", router_id="router") as client,
    ):
        longest_s = CHECK_S
        while longest_s >= CHECK_S:  # the machine paused
            await client.describe()  # the first call starts a check
            checked = [one._checked_at for one in client._schedulers]
            began = last = loop.time()
            longest_s = 0.0
            while last - began < 1.2 * CHECK_S:
                await client.describe()
                await asyncio.sleep(0.01)
                longest_s, last = max(longest_s, loop.time() - last), loop.time()
        assert [one._checked_at for one in client._schedulers] == checked
        await asyncio.sleep(1.1 * CHECK_S)
        homes(client)
        assert min(one._checked_at for one in client._schedulers) > max(checked)


async def test_keys_spread_evenly_and_only_those_of_a_dead_scheduler_move():
    draw = random.Random(1)
    for count in (2, 3, 5, 8):
        endpoints = [Endpoint(f"10.0.0.{number}:7400") for number in range(count)]
        keys = [f"{draw.getrandbits(64):x}" for _ in range(4_000)]
        before = {key: owner(endpoints, key) for key in keys}
        shares = Counter(one.address for one in before.values())
        mean = len(keys) / count
        assert all(abs(shares[one.address] - mean) < 5 * mean**0.5 for one in endpoints)
        gone = draw.choice(endpoints)
        left = [one for one in endpoints if one is not gone]
        draw.shuffle(left)  # order does not matter
        moved = {key: owner(left, key) for key in keys if owner(left, key) is not before[key]}
        assert all(before[key] is gone for key in moved)
        assert len(moved) == shares[gone.address]
        taken = Counter(one.address for one in moved.values())
        assert all(taken[one.address] > len(moved) / len(left) / 2 for one in left)
        for one in endpoints:
            await one.close()


async def test_the_keys_of_a_hanging_scheduler_move_and_come_back(elsewhere, monkeypatch):
    process, address = elsewhere
    monkeypatch.setattr("baton.scheduler.endpoints.BACK_S", 0.3)
    async with (
        SchedulerServer(Options()) as server,
        SchedulerClient(f"{address},{server.address}", router_id="router") as client,
    ):
        assert homes(client) == {address, server.address}
        mine = {name for name in NAMES if client.home(name) == server.address}
        freeze(process.pid)
        await all_at(client, server.address)
        process.resume()
        await all_at(client, address, server.address)
        assert {name for name in NAMES if client.home(name) == server.address} == mine
