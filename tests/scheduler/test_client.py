"""A router's client against a real scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from harness.scheduling import Options, identity, need, place, until


@pytest.fixture
async def server() -> AsyncIterator[SchedulerServer]:
    async with SchedulerServer(Options(heartbeat_s=0.05, placement_lease_s=0.4)) as running:
        yield running


@pytest.fixture
async def client(server: SchedulerServer) -> AsyncIterator[SchedulerClient]:
    async with SchedulerClient(server.address) as made:
        yield made


async def test_a_client_renews_its_placements(server: SchedulerServer) -> None:
    async with SchedulerClient(server.address) as operator:
        async with SchedulerClient(server.address, router_id="router") as router:
            await router.register(identity("m"), pb.WORKER_STATE_READY)
            await place(router, "held", 1, 1, 1)
            for number in range(3):
                async with SchedulerClient(server.address) as dies:
                    await place(dies, f"left{number}", 1, 1, 1)

                async def left_gone() -> bool:
                    return len((await operator.describe()).attempts) == 1

                await until(left_gone)
            assert [one.attempt.request_id for one in (await operator.describe()).attempts] == ["held"]

        async def gone() -> bool:
            return not (await operator.describe()).attempts

        await until(gone)  # its lease has expired


async def test_a_need_of_another_router_is_not_placed(client: SchedulerClient) -> None:
    theirs = need(router_id="another")
    with pytest.raises(ValueError, match="a need of router 'another' is placed as router ''"):
        await client.place(theirs)
    with pytest.raises(ValueError, match="a need of router 'another'"):
        client.place_alone(theirs)
