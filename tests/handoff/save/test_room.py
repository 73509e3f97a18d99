"""The admission of prompts while staging is nearly full."""

from baton.handoff.save.room import SaveRoom


class Room(SaveRoom):
    """Gives each block a slot by default."""

    def admits(self, request_id, blocks, slots=None):
        return super().admits(request_id, blocks, blocks if slots is None else slots)


def room(free, capacity=10, wait_s=60.0, cache_blocks=100):
    made = Room(cache_blocks, wait_s)
    made.hear({0: (free, capacity)})
    return made


def test_promised_room_counts_until_the_save():
    made = room(free=10)
    assert made.admits("a", 6)
    assert not made.admits("b", 6)
    made.hear({0: (4, 10)})  # a is saved
    made.forget("a")
    assert not made.admits("b", 6)
    made.hear({0: (10, 10)})  # and pulled
    assert made.admits("b", 6)
    assert made.admits("b", 6)  # asked again after a preemption


def test_admission_is_first_come_first_served():
    made = room(free=5)
    assert not made.admits("large", 8)
    assert not made.admits("small", 2)  # although it would fit
    made.hear({0: (10, 10)})
    assert made.admits("large", 8)
    assert made.admits("small", 2)
    made = room(free=5)
    assert not made.admits("gone", 8)
    made.forget("gone")
    assert made.admits("small", 2)


def test_the_rank_with_the_least_room_decides():
    made = room(free=10)
    made.hear({1: (3, 10)})
    assert not made.admits("a", 4)
    made.hear({1: (4, 10)})
    assert made.admits("a", 4)


def test_a_request_that_waited_too_long_is_reported_once_and_then_admitted():
    made = room(free=0, wait_s=0.0)
    assert not made.admits("a", 4)
    assert made.take_overdue() == ["a"]
    assert made.take_overdue() == []
    assert made.admits("a", 4)
    assert not made.admits("b", 4)
    made.forget("b")
    assert made.take_overdue() == []


def test_saves_that_never_fit_do_not_wait():
    assert room(free=0, capacity=10).admits("a", 11)
    assert room(free=0, capacity=0).admits("a", 1)  # no shared memory at all
    assert Room(100).admits("a", 1)


def test_room_allocated_early_counts_once():
    made = room(free=10)
    assert made.admits("a", 6)
    assert made.promised("a")
    made.hear({0: (4, 10)})  # it has allocated room for all its parts
    made.kept("a")
    assert not made.promised("a")
    assert made.admits("b", 4)
    assert made.admits("a", 6)  # asked again after a preemption


def test_large_saves_get_a_window():
    made = room(free=40, capacity=40)
    assert [made.slots(blocks) for blocks in (1, 20, 21, 40, 1000)] == [1, 20, 10, 10, 10]
    assert [room(free=2, capacity=2).slots(blocks) for blocks in (1, 2, 9)] == [1, 2, 2]
    assert SaveRoom(100).slots(1000) == 1000  # no rank has reported
    made.windows = False
    assert made.slots(1000) == 1000


def test_only_the_window_must_fit():
    made = room(free=25, capacity=40, cache_blocks=600)
    for name in ("a", "b"):
        assert made.admits(name, 100, made.slots(100))
    assert not made.admits("c", 100, made.slots(100))
    made.hear({0: (35, 40)})
    assert made.admits("c", 100, made.slots(100))


def test_windows_leave_half_of_the_cache_to_others():
    made = room(free=40, capacity=40, cache_blocks=200)
    assert made.admits("a", 70, 10)
    assert not made.admits("b", 70, 10)
    assert made.admits("short", 5, 5)
    made.forget("a")  # it is saved, but its blocks are kept
    assert not made.admits("b", 70, 10)
    made.freed("a")
    assert made.admits("b", 70, 10)
    made.freed("b")
    made.forget("b")
    assert made.admits("more than half, alone", 190, 10)
    assert not made.admits("c", 50, 10)
