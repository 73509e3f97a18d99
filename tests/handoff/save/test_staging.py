import time

import numpy as np
import pytest

from baton.handoff import digests
from baton.handoff.errors import LeaseExpired, MalformedManifest, SaveFailed, StagingFull, UnknownHandoff
from baton.handoff.memory import segments
from baton.handoff.memory.arena import Arena
from baton.handoff.memory.views import SaveView
from baton.handoff.save.staging import Staging
from harness.support import PATIENCE

RECORD = 1000
BLOCKS = 60
SIZE = 4096 + BLOCKS * RECORD


@pytest.fixture
def make():
    made = []

    def staging(lease_s=30.0):
        made.append(Staging(Arena(SIZE, RECORD), lease_s))
        return made[-1]

    yield staging
    for one in made:
        one.close()


@pytest.fixture
def staging(make):
    return make()


def put(staging, request_id, epoch=1, blocks=3, fill=7):
    entry = staging.reserve(request_id, epoch, blocks)
    for first, stop in entry.view.pieces(0, blocks, blocks):
        entry.view.records(first, stop)[:] = fill
    staging.publish(entry)
    return entry


def records(entry):
    return np.concatenate([entry.view.records(*part) for part in entry.view.pieces(0, entry.num_blocks, 999)])


def test_saved_then_read_then_released(staging):
    put(staging, "a")
    with staging.opened("a", 1) as entry:
        assert records(entry).shape == (3, 1000)
        assert (records(entry) == 7).all()
    assert staging.held() == (1, 3000)
    assert staging.release("a", 1)
    assert not staging.release("a", 1)
    assert staging.held() == (0, 0)
    with pytest.raises(UnknownHandoff, match="was released here"), staging.opened("a", 1):
        pass


def test_unpublished_saves_are_unknown(staging):
    with pytest.raises(UnknownHandoff, match="never saved"), staging.opened("a", 1):
        pass
    reserved = staging.reserve("a", 1, 1)
    with pytest.raises(UnknownHandoff), staging.opened("a", 1):  # it is not published yet
        pass
    staging.discard(reserved)


def test_a_lease_expires_by_itself(make, eventually):
    staging = make(lease_s=0.05)
    put(staging, "a", blocks=60)
    eventually(lambda: staging.held() == (0, 0))
    with pytest.raises(LeaseExpired, match=r"lease of 0\.05 s"), staging.opened("a", 1):
        pass
    put(staging, "b", blocks=60)  # there is room again


def test_a_shorter_lease_after_a_longer_one_expires_in_time(make, eventually):
    staging = make(lease_s=60)
    put(staging, "long")
    staging.lease_s = 0.02
    put(staging, "short")
    eventually(lambda: staging.held()[0] == 1)
    with staging.opened("long", 1):
        pass


def test_memory_that_is_read_is_not_used_again_before_the_reader_ends(make, eventually):
    staging = make()
    put(staging, "a", blocks=59, fill=1)
    with staging.opened("a", 1) as entry:
        staging.lease_s = 0.02
        staging.renew([("a", 1)])
        put(staging, "b", blocks=1)  # its thread looks at the leases again
        eventually(lambda: staging.held() == (0, 0))
        with pytest.raises(StagingFull):
            staging.reserve("c", 1, 60)
        assert (records(entry) == 1).all()
    put(staging, "c", blocks=60)


def test_saves_older_than_a_lease_are_overdue(make, eventually):
    """Renewals, or a reader that does not end, keep them that long."""
    staging = make(2.0)  # longer than the pauses of a busy machine
    put(staging, "renewed")
    assert staging.overdue_s() == 0.0

    def overdue():
        staging.renew([("renewed", 1)])
        return staging.overdue_s() > 0.1

    eventually(overdue)
    with staging.opened("renewed", 1):
        staging.release("renewed", 1)
        assert staging.overdue_s() > 0.1  # the memory is still in use
    assert staging.overdue_s() == 0.0


def test_attempts_at_a_request_have_separate_saves(staging):
    put(staging, "a", epoch=1)
    put(staging, "a", epoch=2, fill=9)
    assert staging.release("a", 1)
    with pytest.raises(UnknownHandoff, match="epoch 1: was released here"), staging.opened("a", 1):
        pass
    with staging.opened("a", 2) as entry:
        assert (records(entry) == 9).all()
    assert staging.held() == (1, 3000)


def test_a_second_entry_of_a_key_ends_the_first(make, eventually):
    staging = make(lease_s=0.05)
    free = staging.free_blocks
    put(staging, "a", epoch=1)
    put(staging, "a", epoch=1, fill=9)
    eventually(lambda: staging.free_blocks == free)
    put(staging, "b")  # leases still expire
    eventually(lambda: staging.held() == (0, 0))


def test_each_end_of_an_entry_is_reported_once(eventually):
    ended = []
    staging = Staging(Arena(SIZE, RECORD), 30.0, lambda request_id, epoch: ended.append((request_id, epoch)))
    staging.discard(staging.reserve("discarded", 1, 3))
    for name in ("released", "closed"):
        put(staging, name)
    assert staging.release("released", 1)
    assert not staging.release("released", 1)
    staging.lease_s = 0.02
    put(staging, "expired")
    eventually(lambda: len(ended) == 2)
    staging.close()
    assert ended == [("released", 1), ("expired", 1), ("closed", 1)]


def test_reading_follows_the_writing(staging):
    entry = staging.reserve("a", 1, 5)
    fill = staging.filling(entry)
    staging.publish(entry)
    fill.add(np.zeros(2, np.uint64))
    chunks = staging.read("a", 1, None, 2 * RECORD)
    assert (found := next(chunks)).first_block == 0
    assert found.data.shape == (2, RECORD)
    fill.close()  # before all of it was there
    with pytest.raises(SaveFailed):
        next(chunks)
    with pytest.raises(MalformedManifest, match=r"blocks 4 to 6 of request 'a' are wanted; 5 are here"):
        next(staging.read("a", 1, (4, 2), RECORD))


def test_the_ticket_is_wiped_with_the_lease(staging):
    entry = put(staging, "a", epoch=5)
    memory = segments.attach(entry.place.segment).data
    view = SaveView(memory, entry.place.offset, RECORD, entry.place.runs)
    assert view.holds(staging.tickets.number("a", 5), 0, 3)
    assert (view.records(0, 3) == 7).all()
    staging.release("a", 5)
    assert view.holds(0, 0, 3)


def test_each_slot_must_have_the_ticket(staging):
    view, ticket = put(staging, "a").view, staging.tickets.number("a", 1)
    assert view.holds(ticket, 0, 3)
    put(staging, "b", blocks=57)
    staging.release("a", 1)
    other = put(staging, "c", blocks=1).view  # gets the slot of the first one
    other.sign(ticket)
    assert [view.holds(ticket, at, at + 1) for at in range(3)] == [True, False, False]
    assert not view.holds(ticket, 0, 3)


def test_a_renewed_lease_does_not_expire(make, eventually):
    staging = make(lease_s=2.5)  # longer than the pauses of a busy machine
    put(staging, "a")
    put(staging, "b")
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        assert staging.renew([("a", 1), ("a", 2), ("nobody", 1)]) == [("a", 2), ("nobody", 1)]
        time.sleep(0.02)
    assert staging.held()[0] == 1
    assert staging.renew([("b", 1)]) == [("b", 1)]
    staging.lease_s = 0.02
    staging.renew([("a", 1)])
    put(staging, "c")  # its thread looks at the leases again
    eventually(lambda: staging.held() == (0, 0))


def test_closing_ends_everything_quickly(staging):
    name = put(staging, "a").place.segment
    start = time.monotonic()
    staging.close()
    staging.close()
    assert time.monotonic() - start < PATIENCE
    assert not segments.exists(name)


def test_digests_differ_by_request_epoch_place_and_bytes():
    data = np.arange(64, dtype=np.uint8).reshape(2, 32)
    same = digests.of_records(data, digests.seed("a", 1), 0).tolist()
    assert same == digests.of_records(data.copy(), digests.seed("a", 1), 0).tolist()
    later = digests.of_records(data, digests.seed("a", 1), 1).tolist()
    assert not set(same) & set(later)
    assert digests.of_records(data[1:], digests.seed("a", 1), 1).tolist() == same[1:]
    assert same[0] != same[1]
    for seed in (digests.seed("b", 1), digests.seed("a", 2)):
        assert not set(same) & set(digests.of_records(data, seed, 0).tolist())
    data[1, -1] ^= 1
    assert digests.of_records(data, digests.seed("a", 1), 0)[1] != same[1]


def test_the_end_of_a_growing_save_ends_its_readers_and_its_fills(staging):
    entry = staging.reserve("a", 1, 5)
    fill = staging.filling(entry, 0, 2)
    fill.add(np.zeros(2, np.uint64))
    fill.close()
    staging.publish(entry, growing=True)
    chunks = staging.read("a", 1, None, 5 * RECORD)
    assert len(next(chunks).data) == 2
    staging.release("a", 1)
    with pytest.raises(UnknownHandoff):
        next(chunks)
    with pytest.raises(UnknownHandoff):
        staging.filling(entry, 2, 5)
    assert staging.free_blocks == staging.capacity
