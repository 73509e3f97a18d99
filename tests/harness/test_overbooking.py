"""Many routers with more requests than the workers can hold, for a few seconds."""

from harness.overbooking import overbook


async def test_nobody_is_overbooked() -> None:
    figures = await overbook(4.0, routers=12, times=3.0, schedulers=1)
    assert (figures["failed"], figures["fullest"]) == (0, 1.0)  # full but not overbooked
    assert list(figures["refused by workers, times"]) == ["0"]
    assert figures["placed"] > 80


async def test_of_two_schedulers_the_workers_refuse_what_both_gave_away() -> None:
    figures = await overbook(4.0, routers=12, times=3.0, schedulers=2)
    assert (figures["failed"], figures["fullest"]) == (0, 1.0)
    again = [count for times, count in figures["refused by workers, times"].items() if int(times) >= 2]
    assert sum(again) < 0.2 * figures["placed"]
