"""Keep saved KV as long as its router is connected and has not released it."""

from __future__ import annotations

import asyncio
import time

from baton.handoff.channels import HandoffClient
from baton.services.worker.outgoing import Outgoing


async def renew_leases(outgoing: Outgoing, ranks: HandoffClient, every_s: float, for_s: float) -> None:
    """Renew the leases of saved KV until cancelled.

    A request may wait at the decode worker for longer than a lease. Saves older than `for_s`, the limit on a
    router's request, are no longer renewed: their release must have been lost. Renewals begin every `every_s`
    seconds, however long one takes, so that there is time for another if one fails.
    """
    while True:
        began = time.monotonic()
        if asked := outgoing.to_renew(for_s):
            held = await asyncio.to_thread(ranks.renew, asked, every_s)
            outgoing.renewed(asked, held, began)
        await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))
