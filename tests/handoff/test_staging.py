from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from baton.handoff import digests, segments
from baton.handoff.arena import Arena
from baton.handoff.errors import LeaseExpired, StagingFull, StaleEpoch, UnknownHandoff
from baton.handoff.staging import Entry, Staging
from baton.handoff.views import View

SIZE = 64 << 10
Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def make() -> Iterator[Callable[..., Staging]]:
    made: list[Staging] = []

    def staging(lease_s: float = 30.0) -> Staging:
        made.append(Staging(Arena(SIZE, segment_bytes=SIZE), lease_s))
        return made[-1]

    yield staging
    for one in made:
        one.close()


def put(staging: Staging, request_id: str, epoch: int = 1, blocks: int = 3, fill: int = 7) -> Entry:
    entry = staging.reserve(request_id, epoch, blocks, 1000)
    entry.records[:] = fill
    staging.publish(entry)
    return entry


def test_saved_then_read_then_released(make: Callable[..., Staging]) -> None:
    staging = make()
    put(staging, "a")
    with staging.opened("a", 1) as entry:
        assert entry.records.shape == (3, 1000)
        assert (entry.records == 7).all()
    assert staging.held() == (1, 3000)
    assert staging.release("a", 1)
    assert not staging.release("a", 1)
    assert staging.held() == (0, 0)
    with pytest.raises(UnknownHandoff, match="was released here"), staging.opened("a", 1):
        pass


def test_what_was_never_saved_is_unknown(make: Callable[..., Staging]) -> None:
    staging = make()
    with pytest.raises(UnknownHandoff, match="never saved"), staging.opened("a", 1):
        pass
    reserved = staging.reserve("a", 1, 1, 10)
    with pytest.raises(UnknownHandoff), staging.opened("a", 1):  # not before it is published
        pass
    staging.discard(reserved)


def test_a_lease_runs_out_without_anybody_calling(
    make: Callable[..., Staging], eventually: Eventually
) -> None:
    staging = make(lease_s=0.05)
    put(staging, "a", blocks=60)
    eventually(lambda: staging.held() == (0, 0))
    with pytest.raises(LeaseExpired, match=r"lease of 0\.05 s"), staging.opened("a", 1):
        pass
    assert (staging.counters.published, staging.counters.expired, staging.counters.released) == (1, 1, 0)
    put(staging, "b", blocks=60)  # the room is there again


def test_a_shorter_lease_behind_a_longer_one_ends_in_time(
    make: Callable[..., Staging], eventually: Eventually
) -> None:
    staging = make(lease_s=60)
    put(staging, "long")
    staging.lease_s = 0.02
    put(staging, "short")
    eventually(lambda: staging.held()[0] == 1)
    with staging.opened("long", 1):
        pass


def test_memory_that_is_read_is_not_used_again_before_the_reader_ends(
    make: Callable[..., Staging], eventually: Eventually
) -> None:
    staging = make(lease_s=0.05)
    put(staging, "a", blocks=60, fill=1)
    with staging.opened("a", 1) as entry:
        eventually(lambda: staging.held() == (0, 0))
        with pytest.raises(StagingFull):
            staging.reserve("b", 1, 60, 1000)
        assert (entry.records == 1).all()
    put(staging, "b", blocks=60)


def test_a_later_epoch_ends_the_earlier_one(make: Callable[..., Staging]) -> None:
    staging = make()
    put(staging, "a", epoch=1)
    put(staging, "a", epoch=2, fill=9)
    with pytest.raises(StaleEpoch, match="here it is epoch 2"), staging.opened("a", 1):
        pass
    with staging.opened("a", 2) as entry:
        assert (entry.records == 9).all()
    with pytest.raises(StaleEpoch, match="epoch 2 of that request"):
        put(staging, "a", epoch=1)
    assert staging.held() == (1, 3000)


def test_the_ticket_stands_only_while_the_lease_does(make: Callable[..., Staging]) -> None:
    staging = make()
    entry = put(staging, "a", epoch=5)
    memory = segments.attach(entry.place.segment)
    assert View(memory, entry.offset).ticket == digests.seed("a", 5)
    assert np.array_equal(memory[entry.offset : entry.offset + 3000], np.full(3000, 7, np.uint8))
    staging.release("a", 5)
    assert View(memory, entry.offset).ticket == 0


def test_closing_ends_everything_quickly(make: Callable[..., Staging]) -> None:
    staging = make()
    name = put(staging, "a").place.segment
    start = time.monotonic()
    staging.close()
    staging.close()
    assert time.monotonic() - start < 1
    assert not segments.exists(name)


def test_digests_differ_by_request_epoch_place_and_bytes() -> None:
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
