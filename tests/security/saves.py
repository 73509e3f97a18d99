"""Saved KV at a real Handoff service, without an engine."""

import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from baton.handoff import digests
from baton.handoff.channels import HandoffClient
from baton.handoff.memory.arena import Arena
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Cancellation, Pull
from baton.handoff.transports.tcp import Tcp
from baton.protos.handoff_pb2 import Manifest, Shard

RECORD, BLOCKS = 4096, 4


@dataclass
class Source:
    """A rank's service; `save` saves four blocks of ones."""

    staging: Staging
    service: HandoffService

    def save(self, request_id):
        entry = self.staging.reserve(request_id, 1, BLOCKS)
        fill = self.staging.filling(entry)
        records = fill.view.records(0, BLOCKS)
        records[:] = 1
        fill.add(np.concatenate([digests.of_records(one[None], 0, 0) for one in records]))
        fill.close()
        self.staging.publish(entry)
        shard = Shard(
            address=self.service.address,
            record_bytes=RECORD,
            ticket=self.staging.tickets.of(request_id, 1),
            offers={"tcp": b""},
        )
        return Manifest(request_id=request_id, epoch=1, shards=[shard])


@contextmanager
def source():
    """Serve with this process's identity."""
    staging = Staging(Arena(64 * RECORD, RECORD), 60.0)
    service = HandoffService(staging, 0, "127.0.0.1:0", RECORD)
    try:
        yield Source(staging, service)
    finally:
        service.close(0)
        staging.close()


class Puller:
    """The other end, with this process's identity."""

    def __init__(self):
        self._tcp = Tcp()
        self.client = HandoffClient()

    def pull(self, manifest):
        """Return the sum of all bytes. Raises HandoffError."""
        pull = Pull(
            request_id=manifest.request_id,
            epoch=manifest.epoch,
            shard=manifest.shards[0],
            saved_blocks=BLOCKS,
            first_block=0,
            num_blocks=BLOCKS,
            chunk_bytes=RECORD,
            cancellation=Cancellation(time.monotonic() + 20),
        )
        return sum(int(records.data.sum()) for records in self._tcp.pull(pull))

    def close(self):
        self._tcp.close()
        self.client.close()
