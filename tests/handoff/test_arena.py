from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.handoff import segments
from baton.handoff.arena import ALIGNMENT, Arena, Place, align
from baton.handoff.errors import StagingFull

KIB = 1024


@contextlib.contextmanager
def arena(bound: int, segment_bytes: int) -> Iterator[Arena]:
    made = Arena(bound, segment_bytes)
    try:
        yield made
    finally:
        made.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30 * KIB), st.integers(0, 9)), max_size=40))
def test_places_never_overlap_and_all_room_comes_back(steps: list[tuple[int, int]]) -> None:
    """Random sizes; each step also gives back one place, by index, where there are that many."""
    with arena(bound=256 * KIB, segment_bytes=64 * KIB) as made:
        held: list[Place] = []
        for size, give in steps:
            with contextlib.suppress(StagingFull):
                held.append(made.allocate(size))
            if give < len(held):
                made.free(held.pop(give))
            taken = sorted((place.segment, place.offset, place.size) for place in held)
            for left, right in itertools.pairwise(taken):
                assert left[0] != right[0] or left[1] + left[2] <= right[1]
            assert all(place.offset % ALIGNMENT == 0 for place in held)
            assert sum(place.size for place in held) + made.free_bytes == made.capacity <= 256 * KIB
        for place in held:
            made.free(place)
        for size in [64 * KIB] * (made.capacity // (64 * KIB)):
            made.allocate(size)  # the holes have grown together again


def test_the_bound_is_kept_and_the_error_says_what_to_do() -> None:
    with arena(bound=128 * KIB, segment_bytes=64 * KIB) as made:
        for _ in range(2):
            made.allocate(64 * KIB)
        with pytest.raises(StagingFull, match=r"131072 of 131072 bytes wait .*raise handoff.staging_mib"):
            made.allocate(1)


def test_a_piece_larger_than_a_segment_gets_one_of_its_own() -> None:
    with arena(bound=512 * KIB, segment_bytes=64 * KIB) as made:
        assert made.allocate(200 * KIB).size == align(200 * KIB)
        with pytest.raises(StagingFull):
            made.allocate(600 * KIB)


def test_it_grows_ahead_of_need(eventually: Callable[[Callable[[], bool]], None]) -> None:
    with arena(bound=256 * KIB, segment_bytes=64 * KIB) as made:
        eventually(lambda: made.capacity == 64 * KIB)
        made.allocate(40 * KIB)
        eventually(lambda: made.capacity == 128 * KIB)


def test_a_full_dev_shm_is_staging_full() -> None:
    def create(size: int) -> segments.Segment:
        raise OSError(errno.ENOSPC, "No space left on device")

    made = Arena(128 * KIB, 64 * KIB, create)
    with pytest.raises(StagingFull):
        made.allocate(KIB)
    made.close()
