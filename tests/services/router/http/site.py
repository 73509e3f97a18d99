"""A router, and the address of a scheduler that a test starts."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import httpx

from baton.scheduler.service import SchedulerServer
from baton.services.config import SchedulerSettings
from baton.services.tenants.model import ApiKey, digest
from harness.fake_worker import MODEL
from harness.router import Members
from harness.support import eventually, free_port, listening
from harness.zygote import Forked

START_S = 60.0
# Pairs stay pairs: no idle decode worker prefills.
SCHEDULER: dict[str, Any] = {"placement_lease_s": 2.0, "max_queue_factor": 1.0, "idle_decode_tokens": 0}


def api_key(secret: str, tenant: str, **limits: Any) -> ApiKey:
    return ApiKey(tenant=tenant, sha256=digest(secret.encode()).hex(), **limits)


class StartRouter(Protocol):
    def __call__(
        self, folder: Path, environment: dict[str, str] | None = None, **settings: Any
    ) -> Forked: ...


class Site:
    """A router that listens, and the address at which it looks for its scheduler."""

    def __init__(self, start_router: StartRouter, folder: Path, **router: Any) -> None:
        self.port, self.scheduler_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = start_router(
            folder,
            engine={"served_model_name": MODEL, "tool_call_parser": "hermes"},
            scheduler={"address": f"127.0.0.1:{self.scheduler_port}"},
            router={"port": self.port, **router},
        )
        eventually(lambda: listening(self.port), START_S, "the router listens")

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=START_S)

    @contextlib.asynccontextmanager
    async def scheduler(self) -> AsyncIterator[Members]:
        """Run the scheduler inside the block, and its workers."""
        settings = SchedulerSettings(address=f"127.0.0.1:{self.scheduler_port}", **SCHEDULER)
        async with SchedulerServer(settings) as server:
            members = Members(server.address)
            try:
                yield members
            finally:
                await members.close()


async def healthy(client: httpx.AsyncClient, **model: str) -> bool:
    """Return whether the router can place a request, for one model of several."""
    try:
        return (await client.get("/health", params=model)).status_code == 200
    except httpx.ConnectError:  # it is starting
        return False
