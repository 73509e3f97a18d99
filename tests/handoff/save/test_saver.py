"""The saver: its offers end with the lease, whenever that ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

from baton.handoff.groups import Part
from baton.handoff.memory.arena import Arena
from baton.handoff.records import Records
from baton.handoff.save.saver import SaveJob, Saver
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Pull, SavedShard, Transport
from baton.protos.handoff_pb2 import Shard
from tests.handoff.caches import MIB, make_cache


class Slow(Transport):
    """Keeps something for each offer, and takes longer over it than the lease lasts."""

    name = "slow"

    def __init__(self) -> None:
        self.kept: set[tuple[str, int]] = set()

    def offer(self, saved: SavedShard) -> bytes:
        time.sleep(0.2)
        self.kept.add((saved.request_id, saved.epoch))
        return b"here"

    def withdraw(self, request_id: str, epoch: int) -> None:
        self.kept.discard((request_id, epoch))

    def reaches(self, shard: Shard) -> bool:
        del shard
        return False

    def pull(self, pull: Pull) -> Iterator[Records]:
        raise AssertionError(pull)


def test_an_offer_of_a_lease_that_is_over_is_withdrawn() -> None:
    slow, cache = Slow(), make_cache(8, 1)
    gone = Staging(Arena(MIB, cache.record_bytes), lease_s=0.05)
    kept = Staging(Arena(MIB, cache.record_bytes), lease_s=30)
    for staging, held in ((gone, set()), (kept, {("r", 1)})):
        Saver(cache, staging, [slow], rank=0, address="nowhere:0", chunk_bytes=MIB).save(
            SaveJob("r", 1, (Part(0, 0, (1, 2)),))
        )
        assert slow.kept == held
        staging.close()
    cache.close()
