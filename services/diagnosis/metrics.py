"""Collect the metrics of all processes that can be reached from here, for a bundle."""

from __future__ import annotations

import asyncio
import contextlib
import re
import urllib.request
from http.client import HTTPException

from baton import addresses, plain_http
from baton.errors import BatonError
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.members import members
from baton.services import credentials
from baton.services.config import Settings

MOST = 64  # maximum number of the scheduler's processes
MOST_BYTES = 1 << 20  # per answer
TIMEOUT_S = 5.0
AT_ONCE = 16
_NOT_IN_NAMES = re.compile(r"[^\w.-]")


async def gathered(settings: Settings, description: pb.Description | None) -> dict[str, str]:
    """Return each process's metrics, or why they are missing, by its name.

    Scrapes every process the scheduler lists, and those whose ports are set.
    """
    texts, urls = {}, _named(settings)
    told = description or pb.Description()
    for one in members((worker.identity for worker in told.workers), told.processes)[:MOST]:
        name = _NOT_IN_NAMES.sub("_", f"{one.role}-{one.id}")
        if one.reachable:
            urls[name] = f"http://{one.address}/metrics"
        else:
            texts[name] = f"not asked: {one.address!r} cannot be reached from another machine\n"
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(url: str) -> str:
        async with turns:
            return await asyncio.to_thread(_fetched, settings, url)

    return texts | dict(zip(urls, await asyncio.gather(*map(ask, urls.values())), strict=True))


def _named(settings: Settings) -> dict[str, str]:
    found = {"router": f"{settings.router.url}/metrics"}
    ports = {
        "scheduler": (settings.scheduler.address.split(",")[0], settings.scheduler.metrics_port),
        "worker": (settings.worker.listen, settings.worker.metrics_port),
    }
    for name, (listen, port) in ports.items():
        if port:
            host, _ = addresses.split(addresses.from_here(listen))
            found[name] = f"http://{addresses.join(host, port)}/metrics"
    return found


def _fetched(settings: Settings, url: str) -> str:
    request = urllib.request.Request(url)  # noqa: S310 (our own http URL)
    if url.startswith(f"{settings.router.url}/"):
        with contextlib.suppress(BatonError):  # the router answers 401 if only it can read the key file
            for key in credentials.api_keys(settings.router)[:1]:
                request.add_header("Authorization", f"Bearer {key}")
    try:
        with plain_http.get(request, TIMEOUT_S) as answer:
            return str(answer.read(MOST_BYTES).decode(errors="replace"))
    except (OSError, HTTPException) as error:
        return f"not reached: {url}: {error}\n"
