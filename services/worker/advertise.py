"""Find the addresses at which other processes reach a worker and its KV.

A worker that listens on one address advertises it. A worker that listens on all addresses (0.0.0.0, ::)
advertises the one from which it reaches the scheduler.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from baton import addresses
from baton.services.config import Settings
from baton.services.errors import StartError

TRY_S = 2.0  # limit for one scheduler to accept a connection
RETRY_S = 0.5
FAMILY_S = 0.25  # delay before a name's next address is tried in parallel (RFC 8305)


@dataclass(frozen=True)
class Advertised:
    worker: str  # host:port of the gRPC server
    kv_host: str  # host of the ranks' Handoff services, which have ports of their own


async def advertised(settings: Settings, port: int, wait_s: float) -> Advertised:
    """Return a worker's addresses. Raises StartError if it needs a scheduler and reaches none in `wait_s`."""
    listen, _ = addresses.split(settings.worker.listen)
    given, given_port = addresses.split(settings.worker.advertise) if settings.worker.advertise else ("", 0)
    kv_listen = settings.handoff.host or listen
    own = given
    if not given and (addresses.is_wildcard(listen) or addresses.is_wildcard(kv_listen)):
        own = await address_towards(settings.scheduler.address, wait_s)
    host = own if given or addresses.is_wildcard(listen) else listen
    kv_host = own if addresses.is_wildcard(kv_listen) else settings.handoff.host or host
    return Advertised(addresses.join(host, given_port or port), kv_host)


async def address_towards(schedulers: str, wait_s: float) -> str:
    """Return the local address of a connection to the first scheduler that accepts. Raises StartError."""
    deadline = time.monotonic() + wait_s
    while True:
        for scheduler in schedulers.split(","):
            try:
                return await _own_name(scheduler, min(TRY_S, max(0.1, deadline - time.monotonic())))
            except (OSError, ValueError) as error:  # a TimeoutError is an OSError too
                problem = " ".join(str(error).split()) or "no answer"
        if time.monotonic() + RETRY_S > deadline:
            raise StartError(
                f"no scheduler at {schedulers} can be reached ({problem}), so this worker does not know "
                "which of its addresses others can dial: is it up, is the address right? "
                "Or set worker.advertise"
            )
        await asyncio.sleep(RETRY_S)


async def _own_name(scheduler: str, timeout_s: float) -> str:
    host, port = addresses.split(scheduler)
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection(host, port, happy_eyeballs_delay=FAMILY_S)
    name: str = writer.get_extra_info("sockname")[0]
    writer.close()
    return name
