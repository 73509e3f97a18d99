"""Collect the transports' offers of a save, which tell pullers how to find it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton.handoff import transports
from baton.handoff.save.entry import Entry
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import SavedShard, Transport

logger = logging.getLogger(__name__)


def offers(
    staging: Staging, offering: Sequence[Transport], entry: Entry, rank: int, chunk_bytes: int
) -> dict[str, bytes]:
    """Ask each transport for its offer of a published entry, by name.

    rank: whose staging this is; chunk_bytes: of records read at once by a transport that reads them.
    """
    saved = SavedShard(
        request_id=entry.request_id,
        epoch=entry.epoch,
        rank=rank,
        num_blocks=entry.num_blocks,
        slots=entry.slots,
        ticket=staging.tickets.of(*entry.key),
        place=entry.place,
        read=lambda: staging.read(*entry.key, None, chunk_bytes),
    )
    found = {}
    for transport in offering:
        if entry.windowed and not transport.windows:
            continue
        try:
            offer = transport.offer(saved)
        except Exception:  # another package's bug: the other transports carry the KV all the same
            logger.exception(
                "transport %r offers nothing of request %r",
                transport.name,
                saved.request_id,
                extra={"request_id": saved.request_id},
            )
            continue
        if offer is not None:
            found[transport.name] = offer
    # it ended before all had offered: withdraw, as they would never hear of its end
    if staging.renew([entry.key]):
        transports.withdraw(offering, *entry.key)
    return found
