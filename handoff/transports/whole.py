"""Pull records into private memory, and check their digests."""

from __future__ import annotations

import numpy as np

from baton.handoff import digests
from baton.handoff.errors import TransportFailed
from baton.handoff.records import Bytes
from baton.handoff.transports.base import Pull, Transport


def pulled(transport: Transport, pull: Pull) -> Bytes:
    """Pull all records of an order: [num_blocks, record_bytes] uint8. Raises HandoffError."""
    seed, at = digests.seed(pull.request_id, pull.epoch), 0
    found = np.empty((pull.num_blocks, pull.record_bytes), np.uint8)
    for records in transport.pull(pull):
        here = found[at : at + len(records.data)]
        if records.first_block != pull.first_block + at or len(here) != len(records.data):
            raise TransportFailed(f"{pull.what}: record {records.first_block} came out of turn")
        here[:] = records.data
        came = digests.of_records(here, seed, records.first_block)
        digests.compare(pull.what, records.first_block, came, records.digests)
        at += len(here)
    if at != pull.num_blocks:
        raise TransportFailed(f"{pull.what}: {at} records came of {pull.num_blocks}")
    return found
