"""Windowed saves: records that wait in the engine's blocks, and when these are freed."""

from contextlib import closing

import numpy as np
import pytest

from baton.handoff import windows
from baton.handoff.errors import AlreadyTaken, HandoffError, MalformedManifest, UnknownHandoff
from baton.handoff.groups import Part
from baton.handoff.memory.cache import HostBlockCache
from baton.handoff.save import backlog
from baton.handoff.save.saver import SaveJob
from tests.handoff.caches import MIB, make_cache, random_blocks, records, source

BLOCKS, RECORDS, SLOTS = 41, 20, 8
KEY = "r", 1
PROMPT = random_blocks(BLOCKS, RECORDS, 1)


@pytest.fixture
def saving():
    with closing(source(make_cache(BLOCKS, 1), lease_s=30)) as made:
        yield made


def begin(saving, blocks=PROMPT, name="r", stop=RECORDS):
    """Order the save of a prompt's records up to `stop`."""
    parts = (Part(0, 0, blocks[:stop]),)
    saved = saving.saver.save(SaveJob(name, 1, parts, RECORDS, last=stop == RECORDS, slots=SLOTS))
    assert saved.problem is None, saved.problem
    return saving.staging._entries[name, 1]


@pytest.fixture
def full(saving, eventually):
    """A save with a record in each slot, while others wait."""
    entry = begin(saving)
    eventually(lambda: entry.view.is_whole(SLOTS - 1))
    return entry


def go_on(saving, blocks, first):
    """Order the save of the prompt's records from `first` on."""
    assert (
        saving.saver.save(SaveJob(*KEY, (Part(0, first, blocks[first:]),), RECORDS, slots=SLOTS)) is not None
    )


def pull(saving, name="r", first=0):
    """Read and acknowledge records as a puller does; return those from `first` on."""
    found = []
    for chunk in saving.staging.read(name, 1, (first, RECORDS - first), MIB):
        found.append(chunk.data.copy())
        saving.staging.take(name, 1, chunk.first_block + len(chunk.data))
    return np.concatenate(found)


def test_records_without_a_slot_wait_until_others_are_taken(saving, eventually):
    free = saving.staging.free_blocks
    entry = begin(saving)
    assert saving.staging.free_blocks == free - SLOTS
    saving.saver.backlog.leave([KEY])
    eventually(lambda: entry.view.is_whole(SLOTS - 1))
    assert entry.room == 0
    assert saving.saver.backlog.copied() == []
    assert saving.staging.held() == (1, SLOTS * entry.record_bytes)
    assert np.array_equal(pull(saving), records(saving.cache, PROMPT))
    assert saving.saver.backlog.copied() == [KEY]
    assert saving.saver.backlog.copied() == []
    assert saving.staging.release(*KEY)
    assert saving.staging.free_blocks == free


def test_each_step_adds_to_the_backlog(saving, eventually):
    begin(saving, stop=12)
    go_on(saving, PROMPT, 12)
    assert np.array_equal(pull(saving), records(saving.cache, PROMPT))
    saving.saver.backlog.leave([KEY])
    assert saving.saver.backlog.copied() == [KEY]


def test_wrong_acknowledgements_are_refused(saving, full, eventually):
    take = saving.staging.take
    for name, epoch in (("r", 2), ("else", 1)):
        with pytest.raises(UnknownHandoff):
            take(name, epoch, 1)
    for taken in (SLOTS + 1, RECORDS, 2**32 - 1):
        with pytest.raises(MalformedManifest, match=f"{taken} records cannot be acknowledged.*; 0 were"):
            take(*KEY, taken)
    take(*KEY, 3)
    take(*KEY, 3)  # repeated
    eventually(lambda: full.view.is_whole(SLOTS + 2))
    with pytest.raises(MalformedManifest, match=r"2 records cannot be acknowledged.*; 3 were"):
        take(*KEY, 2)
    saving.save("whole", 64, (1, 2))
    with pytest.raises(MalformedManifest, match="in its 2 slots"):
        take("whole", 1, 1)


def test_slots_are_reused_after_the_last_reader(saving, full, eventually):
    take = saving.staging.take
    take(*KEY, 3, reader=(0, 2))
    assert (full.taken, full.room) == (0, 0)  # the other rank has not begun
    take(*KEY, 2, reader=(1, 2))
    assert full.taken == 2
    eventually(lambda: full.view.is_whole(SLOTS + 1))
    with pytest.raises(MalformedManifest, match=r"2 records cannot be acknowledged.*; 3 were"):
        take(*KEY, 2, reader=(0, 2))
    take(*KEY, 3, RECORDS - 1, reader=(0, 2))  # wants only the last one
    assert (full.taken, full.wanted) == (2, 2)
    take(*KEY, 4, reader=(1, 2))
    assert (full.taken, full.wanted) == (3, 4)


def test_slots_do_not_wait_for_a_reader_that_has_released(saving, full, eventually):
    """A pipeline's stage may need none of the last records."""
    saving.staging.take(*KEY, 2, reader=(1, 2))
    assert (full.taken, full.room) == (0, 0)
    assert saving.staging.release(*KEY, reader=(0, 2))
    assert (full.taken, full.wanted) == (0, 2)
    eventually(lambda: full.view.is_whole(SLOTS + 1))
    assert saving.staging.release(*KEY, reader=(1, 2))
    assert saving.staging.held() == (0, 0)


def test_taken_records_are_gone(saving, full, eventually):
    (first, *_) = saving.staging.read(*KEY, (0, SLOTS), MIB)
    assert first.first_block == 0
    saving.staging.take(*KEY, 1)
    eventually(lambda: full.view.is_whole(SLOTS))
    with pytest.raises(AlreadyTaken, match="block 0 was taken before"):
        next(iter(saving.staging.read(*KEY, (0, 1), MIB)))
    ticket = saving.staging.tickets.number(*KEY)
    assert not full.view.lends(ticket, 0, 1)
    assert full.view.lends(ticket, SLOTS, SLOTS + 1)


def test_a_preempted_prompt_is_saved_from_its_new_blocks(saving, eventually):
    assert isinstance(saving.cache, HostBlockCache)
    expected = records(saving.cache, PROMPT)
    entry = begin(saving, stop=12)
    eventually(lambda: entry.view.is_whole(SLOTS - 1))
    saving.saver.withhold([KEY, ("else", 1)])
    again = tuple(block for block in range(1, BLOCKS) if block not in PROMPT)[:RECORDS]
    saving.cache.scatter(0, expected, again)
    saving.cache.scatter(0, np.full_like(expected, 0xA5), PROMPT)  # another request overwrites them
    go_on(saving, again, 0)
    assert np.array_equal(pull(saving), expected)


def test_a_preemption_after_the_prompts_end_ends_the_save(saving, eventually):
    """Its last token may come from the previous step, so nothing recomputes its blocks."""
    begin(saving)
    saving.saver.withhold([KEY])
    assert saving.staging.held() == (0, 0)
    saving.saver.backlog.leave([KEY])
    assert saving.saver.backlog.copied() == [KEY]


def test_a_preemption_waits_for_the_running_copy(saving, full, eventually, monkeypatch):
    stream = saving.saver.backlog._streams[KEY]
    eventually(lambda: not stream.copying)  # the current turn ends
    stream.copying = True
    saving.saver.backlog.leave([KEY])
    monkeypatch.setattr(backlog, "_WITHHOLD_S", 0.01)
    with pytest.raises(HandoffError, match="still being copied"):
        saving.saver.backlog.withhold([KEY])
    assert saving.saver.backlog.copied() == []
    stream.copying = False
    assert saving.saver.backlog.copied() == [KEY]


@pytest.mark.parametrize("how", ["release", "lease"])
def test_the_end_of_the_lease_frees_blocks_and_slots(how, eventually):
    with closing(source(make_cache(BLOCKS, 1), lease_s=1.0 if how == "lease" else 30)) as saving:
        free = saving.staging.free_blocks
        told = []
        saving.saver.backlog.on_copied = lambda: told.append(1)
        begin(saving, stop=12)
        saving.saver.backlog.leave([KEY])
        if how == "release":
            saving.staging.release(*KEY)
        eventually(lambda: bool(told))
        eventually(lambda: saving.saver.backlog.copied() == [KEY])
        eventually(lambda: saving.staging.free_blocks == free)
        late = saving.saver.save(SaveJob(*KEY, (Part(0, 12, (1,) * 8),), RECORDS, slots=SLOTS))
        assert late.problem.name == ("LeaseExpired" if how == "lease" else "UnknownHandoff")


def test_requests_without_waiting_blocks_are_freed_at_once(saving):
    saving.saver.backlog.leave([("nothing", 1)])
    assert saving.saver.backlog.copied() == [("nothing", 1)]


def test_a_slow_puller_does_not_hold_up_another(saving, eventually):
    begin(saving, name="slow")
    blocks = random_blocks(BLOCKS, RECORDS, 3)
    begin(saving, blocks, "quick")
    assert np.array_equal(pull(saving, "quick"), records(saving.cache, blocks))
    assert saving.staging._entries["slow", 1].taken == 0


def test_copies_are_short_and_rotate(saving, monkeypatch, eventually):
    turns = []
    original = saving.cache.fill

    def fill(parts, *rest):
        turns.append((parts[0].block_ids[0], len(parts[0].block_ids)))
        if len(turns) == 1:
            begin(saving, tuple(range(21, 41)), "second")  # while the first is being copied
        original(parts, *rest)

    monkeypatch.setattr(saving.cache, "fill", fill)
    begin(saving, tuple(range(1, 21)), "first")
    eventually(lambda: saving.staging.held()[0] == 2)
    assert len(pull(saving, "second")) == RECORDS
    assert max(count for _, count in turns) == windows.part(SLOTS)
    assert [block > 20 for block, _ in turns[1:5]] == [False, True, False, True]


def test_a_copy_that_fails_ends_the_save(saving, full, monkeypatch, eventually):
    def gather(*_):
        raise RuntimeError("broken on demand")

    monkeypatch.setattr(saving.cache, "gather", gather)
    saving.staging.take(*KEY, 1)
    saving.saver.backlog.leave([KEY])
    eventually(lambda: saving.staging.held() == (0, 0))
    eventually(lambda: saving.saver.backlog.copied() == [KEY])
    assert saving.staging.free_blocks == saving.staging.capacity
