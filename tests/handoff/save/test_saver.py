"""The saver: prompts of one and several steps, and offers."""

from contextlib import closing

import pytest

from baton.handoff.groups import Part
from baton.handoff.memory.arena import Arena
from baton.handoff.save.saver import SaveJob, Saver
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Transport
from baton.handoff.transports.tcp import Tcp
from baton.protos.handoff_pb2 import Shard
from tests.handoff.caches import MIB, make_cache


class Slow(Transport):
    """A transport that keeps something per offer, and may be slow to make one."""

    name = "slow"

    def __init__(self, wait=lambda: None):
        self.kept = set()
        self._wait = wait

    def offer(self, saved):
        self._wait()
        self.kept.add((saved.request_id, saved.epoch))
        return b"here"

    def withdraw(self, request_id, epoch):
        self.kept.discard((request_id, epoch))

    def reaches(self, shard):
        del shard
        return False

    def pull(self, pull):
        raise AssertionError(pull)


def test_an_offer_whose_lease_has_ended_is_withdrawn(eventually):
    cache = make_cache(8, 1)
    gone = Staging(Arena(MIB, cache.record_bytes), lease_s=0.05)
    kept = Staging(Arena(MIB, cache.record_bytes), lease_s=30)
    for staging, slow, held in (
        (gone, Slow(lambda: eventually(lambda: gone.held() == (0, 0))), set()),
        (kept, Slow(), {("r", 1)}),
    ):
        Saver(cache, staging, [slow], rank=0, address="nowhere:0", chunk_bytes=MIB).save(
            SaveJob("r", 1, (Part(0, 0, (1, 2)),))
        )
        assert slow.kept == held
        staging.close()
    cache.close()


def test_only_transports_that_support_windows_offer_them():
    slow, cache = Slow(), make_cache(8, 1)
    with closing(Staging(Arena(MIB, cache.record_bytes), lease_s=30)) as staging:
        saver = Saver(cache, staging, [slow, Tcp()], rank=0, address="nowhere:0", chunk_bytes=MIB)
        saved = saver.save(SaveJob("r", 1, (Part(0, 0, (1, 2, 3, 4)),), slots=2))
        shard = Shard.FromString(saved.shard)
        assert (list(shard.offers), shard.slots, slow.kept) == (["tcp"], 2, set())
        saver.close()


def part(first, *blocks):
    return (Part(0, first, blocks),)


@pytest.fixture
def saving():
    cache = make_cache(8, 1)
    staging = Staging(Arena(5 * (cache.record_bytes + 64) + 8192, cache.record_bytes), lease_s=30)
    yield Saver(cache, staging, [], rank=0, address="nowhere:0", chunk_bytes=MIB), staging
    staging.close()


def test_a_prompt_of_several_steps_is_one_save(saving):
    saver, staging = saving
    first = saver.save(SaveJob("r", 1, part(0, 1, 2), 4, last=False))
    assert first.begun
    assert first.problem is None
    chunks = staging.read("r", 1, None, MIB)
    assert len(next(chunks).data) == 2
    assert saver.save(SaveJob("r", 1, part(2, 3), 4, last=False)) is None
    last = saver.save(SaveJob("r", 1, part(3, 4), 4))
    assert (last.begun, last.shard, last.problem) == (False, first.shard, None)
    assert sum(len(one.data) for one in chunks) == 2
    assert staging.held()[0] == 1


def test_a_first_step_without_room_is_reported_with_the_last(saving):
    saver, _ = saving
    assert saver.save(SaveJob("r", 1, part(0, 1, 2), 40, last=False)) is None
    last = saver.save(SaveJob("r", 1, part(2, 3), 40))
    assert last.problem.name == "StagingFull"


def test_a_save_whose_lease_ends_before_it_is_complete_fails(saving):
    saver, staging = saving
    assert saver.save(SaveJob("r", 1, part(0, 1, 2), 4, last=False)) is not None
    staging.release("r", 1)
    last = saver.save(SaveJob("r", 1, part(2, 3, 4), 4))
    assert last.problem.name == "UnknownHandoff"
    assert staging.free_blocks == staging.capacity


def test_an_aborted_prompt_frees_its_room(saving):
    saver, staging = saving
    assert saver.save(SaveJob("r", 1, part(0, 1, 2), 4, last=False)) is not None
    saver.drop([("else", 1), ("r", 1)])
    assert staging.free_blocks == staging.capacity
