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
    """Return the transports' offers of a published entry, by name.

    rank: of this staging; chunk_bytes: size of the chunks that a transport reads.
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
        except Exception:  # a bug in another package must not affect the other transports
            logger.exception(
                "transport %r failed to offer request %r",
                transport.name,
                saved.request_id,
                extra={"request_id": saved.request_id},
            )
            continue
        if offer is not None:
            found[transport.name] = offer
    # the entry may have ended before all transports had made their offers
    if staging.renew([entry.key]):
        transports.withdraw(offering, *entry.key)
    return found
