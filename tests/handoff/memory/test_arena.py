import errno
import itertools
from contextlib import closing, contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.handoff.errors import HandoffError, StagingFull
from baton.handoff.memory import segments
from baton.handoff.memory.arena import Arena
from baton.handoff.memory.segments import PAGE
from baton.handoff.memory.views import HEADER_BYTES

KIB = 1024
RECORD = 1000  # bytes; 512 records end with a page


@contextmanager
def arena(slots, *, record_bytes=RECORD, step_bytes=16 * KIB):
    headers = -(-slots * HEADER_BYTES // PAGE) * PAGE
    with closing(Arena(headers + slots * record_bytes, record_bytes, step_bytes)) as made:
        assert made.slots == slots
        yield made


def slots_of(place):
    return [slot for first, count in place.runs for slot in range(first, first + count)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=40), st.sampled_from([1000, 4096]))
def test_all_free_slots_can_be_allocated_after_any_history(steps, record):
    """Each step allocates a number of slots, and frees the allocation with an index, if it exists."""
    with arena(200, record_bytes=record) as made:
        held = []
        free = 200
        for count, give in steps:
            assert made.free_slots == free
            if count <= free:
                held.append(made.allocate(count))
                free -= count
            else:
                with pytest.raises(StagingFull):
                    made.allocate(count)
            if give < len(held):
                free += len(slots_of(held[give]))
                made.free(held.pop(give))
            taken = [slot for place in held for slot in slots_of(place)]
            assert len(set(taken)) == len(taken) == 200 - free
            assert all(0 <= slot < 200 for slot in taken)
        if free:
            held.append(made.allocate(free))
        assert made.free_slots == 0
        for place in held:
            made.free(place)
        step = made._step  # slots that have grown together
        assert made._holes._runs == [(at, min(step, 200 - at)) for at in range(0, 200, step)]


def test_one_save_can_be_as_large_as_the_bound():
    with arena(64, record_bytes=4096) as made:
        place = made.allocate(64)
        view = place.view()
        for first, stop in view.pieces(0, 64, 64):
            view.records(first, stop)[:] = np.arange(first, stop, dtype=np.uint8)[:, None]
        memory = segments.attach(place.segment).data
        records = memory[place.offset : place.offset + 64 * 4096].reshape(64, 4096)
        assert np.array_equal(records[:, 0], np.arange(64))


def test_an_allocation_uses_the_longest_runs():
    with arena(40, record_bytes=4096, step_bytes=MANY) as made:
        places = [made.allocate(count) for count in (4, 1, 2, 1, 6, 1, 3, 22)]
        for place in places[::2]:
            made.free(place)
        assert made.allocate(3).runs == ((0, 3),)  # the first run that is long enough
        assert made.allocate(7).runs == ((8, 6), (15, 1))
        assert made.free_slots == 1 + 2 + 2


MANY = 1 << 20


def test_no_run_crosses_a_step():
    """Memory is pinned in steps, and no copy may span two of them."""
    with arena(40, record_bytes=4096, step_bytes=16 * 4096) as made:
        assert made.allocate(40).runs == ((0, 16), (16, 16), (32, 8))


@pytest.mark.parametrize(("size", "grown"), [(0, 16), (16 * 4096, 16), (17 * 4096, 32), (1 << 30, 40)])
def test_begin_faults_in_at_least_this_much(size, grown):
    with arena(40, record_bytes=4096, step_bytes=16 * 4096) as made:
        made.begin(size)
        assert made.grown == grown
        made.begin(size)
        assert made.grown == grown


@pytest.mark.parametrize("record", [264, 1000, 4096, 88_064, 501_120])
def test_steps_are_contiguous_whole_pages(record):
    pinned = []

    def pin(memory):
        pinned.append((memory.ctypes.data, memory.size))

    with closing(Arena(4 << 20, record, 1 << 20, pin=pin)) as made:
        made.allocate(made.slots)
        assert all(at % PAGE == size % PAGE == 0 for at, size in pinned)
        assert all(at + size == after for (at, size), (after, _) in itertools.pairwise(pinned))
        assert 3 << 20 < sum(size for _, size in pinned) <= 4 << 20


def test_the_bound_is_kept_and_the_error_says_what_to_do():
    with arena(32, record_bytes=4096) as made:
        for _ in range(2):
            made.allocate(16)
        with pytest.raises(
            StagingFull, match=r"32 of 32, each of 4096 bytes, wait .*raise handoff.staging_mib"
        ):
            made.allocate(1)


def test_a_bound_below_one_block_is_an_error_that_names_its_key():
    with pytest.raises(HandoffError, match=r"handoff\.staging_mib is 1, but the KV of one block takes 2 MiB"):
        Arena(1 << 20, 2 << 20)


def test_it_grows_ahead_of_need(eventually):
    with arena(32, record_bytes=4096, step_bytes=8 * 4096) as made:
        eventually(lambda: made.grown == 8)
        made.allocate(5)
        eventually(lambda: made.grown == 16)


def test_a_full_dev_shm_is_staging_full():
    def create(size, present):
        raise OSError(errno.ENOSPC, "No space left on device")

    with closing(Arena(128 * KIB, 4096, create=create)) as made, pytest.raises(StagingFull):
        made.allocate(1)


def test_a_full_dev_shm_stops_growth(monkeypatch):
    grow = segments.Segment.grow

    def until_full(self, start, stop):
        if stop > 16 * 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        grow(self, start, stop)

    monkeypatch.setattr(segments.Segment, "grow", until_full)
    with arena(32, record_bytes=4096, step_bytes=8 * 4096) as made:
        with pytest.raises(StagingFull):
            made.allocate(9)
        assert made.slots == made.free_slots == 8
        made.free(made.allocate(8))
