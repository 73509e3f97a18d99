"""The router's view of its cluster: when no scheduler answers any more, that is counted once."""

from __future__ import annotations

import asyncio

from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.config import PolicySettings
from baton.services.router.cluster import ClusterView
from harness.fake_worker import until
from harness.scheduling import Options
from harness.support import free_port


async def test_a_scheduler_that_goes_is_lost_once_and_one_that_never_came_is_not() -> None:
    address = f"127.0.0.1:{free_port()}"
    client = SchedulerClient(address, router_id="r1", policy=PolicySettings())
    losses = 0

    def lost() -> None:
        nonlocal losses
        losses += 1

    view = ClusterView(client, 5.0, lost=lost)
    watching = asyncio.create_task(view.watch())
    try:
        await until(lambda: not client.answering, "nobody answers yet")
        assert losses == 0
        async with SchedulerServer(Options(address=address)):
            await until(lambda: client.standby.lease_s, "it answers")
        await until(lambda: losses == 1, "it is lost")
        client.standby.lease_s = 0.0
        async with SchedulerServer(Options(address=address)):
            await until(lambda: client.standby.lease_s, "another one answers")
        await until(lambda: losses == 2, "that is lost, too")
    finally:
        watching.cancel()
        await client.close()
