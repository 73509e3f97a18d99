"""Keep saved KV for as long as the router that asked for it is connected and wants it."""

from __future__ import annotations

import asyncio
import time

from baton.handoff.channels import HandoffClient
from baton.services.worker.outgoing import Outgoing


async def renew_leases(outgoing: Outgoing, ranks: HandoffClient, every_s: float, for_s: float) -> None:
    """Renew the leases of saved KV; until cancelled.

    The request waits in a queue on the other side, which may be longer than any lease. After `for_s`, as long
    as a router's request may take, a handoff is dropped: it was pulled, and its release was lost. A renewal
    begins `every_s` after the last one began: if one fails there must be time for another.
    """
    while True:
        began = time.monotonic()
        if asked := outgoing.to_renew(for_s):
            held = await asyncio.to_thread(ranks.renew, asked, every_s)
            outgoing.renewed(asked, held, began)
        await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))
