"""A live page with a real scheduler and registered workers, without engines or a router."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton.addresses import listen
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.config import PolicySettings
from baton.services.router.chronicle import Recent
from baton.services.router.load import RouterCounts
from baton.services.router.ops import server
from baton.services.router.ops.access import PageAccess
from baton.services.router.ops.feed import Feed, Series
from baton.services.router.ops.server import Actions
from harness.scheduling import Options, identity

REFRESH_S = 0.2


@dataclass
class LivePage:
    """A page and its data sources."""

    url: str
    feed: Feed
    recent: Recent
    counts: RouterCounts
    scheduler: SchedulerClient

    async def register(self, *workers: tuple[str, pb.Role]) -> None:
        for name, role in workers:
            await self.scheduler.register(identity(name, role), pb.WORKER_STATE_READY)

    async def beat(self, *names: str, draw: random.Random) -> None:
        """Send a heartbeat with a random load for each worker."""
        for name in names:
            load = pb.WorkerLoad(
                running=draw.randrange(5),
                free_blocks=draw.randrange(100),
                counts=pb.EngineCounts(output_tokens=draw.randrange(1 << 30)),
            )
            await self.scheduler.heartbeat(name, pb.WORKER_STATE_READY, load)


@contextlib.asynccontextmanager
async def live_page(key: str = "", forbidden: str = "", tick_s: float = 0.1) -> AsyncIterator[LivePage]:
    """Serve on a free port a page that updates every `tick_s` seconds."""
    about = {"model": "m", "topic": "test", "router": "router-1", "version": "Baton", "forbidden": forbidden}
    counts, recent = RouterCounts(), Recent()
    async with (
        SchedulerServer(Options(worker_lease_s=60.0)) as scheduler,
        SchedulerClient(scheduler.address, router_id="router", policy=PolicySettings()) as client,
    ):
        series = Series(lambda: counts.message([]), lambda: 0)
        feed = Feed(about, lambda: client.standby.workers, lambda: "", series, tick_s)
        app = server.build_app(feed, recent, Actions([client], feed.events, forbidden), PageAccess(key))
        refreshing = asyncio.create_task(_refresh(client))
        try:
            with listen("127.0.0.1", 0) as sock:
                url = f"http://127.0.0.1:{sock.getsockname()[1]}"
                async with server.serving(app, feed, sock):
                    yield LivePage(url, feed, recent, counts, client)
        finally:
            refreshing.cancel()


async def _refresh(client: SchedulerClient) -> None:
    while True:
        await client.refresh()
        await asyncio.sleep(REFRESH_S)
