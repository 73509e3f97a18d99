"""Many routers with more requests than the workers can hold, for a few seconds."""

from harness.overbooking import overbook


async def test_nobody_is_overbooked_and_the_eldest_go_first() -> None:
    figures = await overbook(6.0, routers=12, times=3.0)
    assert figures["failed"] == 0
    assert figures["placed"] > 100
    assert figures["fullest"] == 1.0  # full, and not beyond
    refused = figures["refused by workers, times"]
    assert sum(count for times, count in refused.items() if int(times) >= 2) < 0.1 * figures["placed"]
    assert figures["overtaken"] < 0.1 * figures["placed"]
