"""The waiting room: turns, limits, classes and the expected wait."""

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry

from baton.services.classes import STANDARD, Classes
from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics
from baton.services.router.state import Party
from baton.services.router.waiting import OWED_S, WaitingRoom
from harness.fake_worker import until

FULL = NotAdmitted("all are full", Why.FULL, 1.0)


class House:
    """A number of rooms, a waiting room for requests (guests), and the order in which they were placed."""

    def __init__(self, rooms=0, limit=100, wait_s=15.0):
        self.rooms = rooms
        self.kept = 0  # rooms reserved for the first class
        self.now = 0.0
        self.inside = []
        self.asked = 0
        self.registry = CollectorRegistry()
        metrics = RouterMetrics(self.registry)
        self.waiting = WaitingRoom(limit, wait_s, metrics, clock=lambda: self.now)

    def guest(self, name, client="", deadline=1000000000.0, tenant="", weight=1, service=STANDARD):
        party = Party(tenant, client, weight)
        return asyncio.create_task(self.waiting.admit(party, deadline, self._door(name), service))

    def back(self, name, wait_s=15.0):
        """Place a guest that lost its room."""
        return asyncio.create_task(self.waiting.resume(wait_s, self._door(name)))

    def leave(self, rooms=1):
        self.rooms += rooms
        self.waiting.freed()

    async def refill(self, rooms=1):
        """Free rooms, and wait until they are taken."""
        self.leave(rooms)
        await until(lambda: self.rooms == 0, "the rooms are taken")

    def _door(self, name):
        async def place(service):
            self.asked += 1
            await asyncio.sleep(0)
            if self.rooms <= (self.kept if service.room < 1 else 0):
                raise FULL
            self.rooms -= 1
            self.inside.append(name)

        return place


async def waiting(house, *guests):
    count = len(guests)
    await until(lambda: len(house.waiting) == count, f"{count} wait")


async def test_clients_take_turns():
    house = House()
    guests = [house.guest(f"a{number}", "a") for number in range(4)]
    await waiting(house, *guests)
    guests += [house.guest("b0", "b"), house.guest("b1", "b"), house.guest("c0", "c")]
    await waiting(house, *guests)
    house.leave(7)
    await asyncio.gather(*guests)
    assert house.inside == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


async def test_tenants_take_turns_by_their_weight():
    """Whatever the number of their clients and requests."""
    house = House()
    flood = [house.guest(f"a{number}", f"client {number % 3}", tenant="a") for number in range(8)]
    await waiting(house, *flood)
    others = [house.guest(f"b{number}", "one", tenant="b", weight=2) for number in range(4)]
    await waiting(house, *flood, *others)
    shown = "baton_router_tenant_waiting_requests", {"tenant": "b"}
    assert house.registry.get_sample_value(*shown) == 4
    house.leave(12)
    await asyncio.gather(*flood, *others)
    assert house.inside == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3", "a4", "a5", "a6", "a7"]
    assert house.registry.get_sample_value(*shown) == 0


async def test_a_tenant_that_was_away_has_no_turns_saved_up_and_none_for_coming_back():
    house = House()
    flood = [house.guest(f"a{number}", tenant="a", weight=3) for number in range(12)]
    await waiting(house, *flood)
    for number in range(4):
        last = house.guest(f"b{number}", tenant="b")
        everyone = [*flood, last]
        await until(lambda: len(house.waiting) == sum(not one.done() for one in everyone), "it waits")  # noqa: B023
        while not last.done():
            await house.refill()
            await asyncio.sleep(0)
    turns = "".join(one[0] for one in house.inside)
    assert turns.count("b") == 4
    assert "bb" not in turns
    assert turns[turns.index("b") : turns.rindex("b")].count("a") >= 3 * 3 - 1


async def test_those_that_lost_their_room_go_before_those_that_had_none():
    house = House()
    guests = [house.guest("first"), house.guest("second")]
    await waiting(house, *guests)  # the first one has the turn
    lost = [house.back("lost"), house.back("lost, too")]
    await waiting(house, *guests, *lost)
    late = house.guest("late", "another")
    await waiting(house, *guests, *lost, late)
    house.leave(5)
    await asyncio.gather(*guests, *lost, late)
    assert house.inside == ["lost", "lost, too", "first", "late", "second"]
    assert len(house.waiting) == 0


async def test_one_that_lost_its_room_is_not_counted_out_and_waits_no_longer_than_it_may():
    house = House(limit=0)
    back = house.back("lost")
    await waiting(house, back)
    with pytest.raises(NotAdmitted):
        await house.guest("new")
    house.leave(1)
    await back
    with pytest.raises(NotAdmitted) as refused:
        await house.back("again", wait_s=0.05)
    assert refused.value is FULL
    assert len(house.waiting) == 0
    house.rooms = 1
    await house.guest("new")
    assert house.inside == ["lost", "new"]


async def test_one_that_lost_its_room_hears_why_it_cannot_come_back():
    house = House()
    guest = house.guest("a")
    await waiting(house, guest)
    gone = NotAdmitted("none is left", Why.NO_WORKERS)

    async def place(service):
        del service
        raise gone

    with pytest.raises(NotAdmitted) as refused:
        await house.waiting.resume(15.0, place)
    assert refused.value is gone
    house.leave()
    await guest


async def test_no_request_overtakes_those_that_wait():
    house = House()
    first = house.guest("first")
    await waiting(house, first)
    house.rooms = 1  # `freed` is not called
    second = house.guest("second")
    await waiting(house, first, second)
    house.leave(1)
    await asyncio.gather(first, second)
    assert house.inside == ["first", "second"]


async def test_only_one_asks_again():
    """The cost of a release does not depend on the number of waiting requests."""
    house = House(limit=1000)
    guests = [house.guest(str(number)) for number in range(500)]
    await waiting(house, *guests)
    await until(lambda: house.asked > 500, "the first in turn asks again")
    before = house.asked
    house.leave()
    await until(lambda: house.inside, "one came in")
    assert house.asked - before <= 4  # the one placed, the next one, and timed retries
    for guest in guests:
        guest.cancel()
    await until(lambda: len(house.waiting) == 0, "all gave up")


async def test_other_routers_releases_are_found_without_a_sign():
    house = House()
    guest = house.guest("a")
    await waiting(house, guest)
    house.rooms = 1
    await guest


async def test_the_queue_is_bounded():
    house = House(limit=2)
    guests = [house.guest("a"), house.guest("b")]
    await waiting(house, *guests)
    with pytest.raises(NotAdmitted, match="max_waiting") as refused:
        await house.guest("c")
    assert (refused.value.why, refused.value.status, refused.value.never) == (Why.QUEUE, 503, False)
    assert refused.value.retry_after_s >= 1
    with pytest.raises(NotAdmitted, match="max_waiting"):
        house.waiting.check_room()
    house.leave(2)
    await asyncio.gather(*guests)
    house.waiting.check_room()


async def test_the_wait_is_bounded_and_says_why():
    house = House(wait_s=0.1)
    guest = house.guest("a")
    with pytest.raises(NotAdmitted, match=r"within 0.1 s \(router.max_wait_s\).*all are full"):
        await guest
    assert len(house.waiting) == 0


async def test_a_request_that_can_never_fit_does_not_wait():
    house = House()
    never = NotAdmitted("too large", Why.TOO_LARGE)

    async def place(service):
        del service
        raise never if len(house.waiting) else FULL

    with pytest.raises(NotAdmitted) as refused:
        await house.waiting.admit(Party(), 1e9, place)
    assert refused.value is never


async def test_the_expected_wait_refuses_early():
    """If 8 requests end together every 4 s, the pace is one per 0.5 s."""
    house = House(limit=1000, wait_s=60)
    guests = [house.guest(str(number), "a") for number in range(200)]
    await waiting(house, *guests)
    assert house.waiting.estimate_s == 0.0  # unknown
    for bunch in range(1, 6):
        house.now += 4
        house.leave(8)
        await until(lambda bunch=bunch: len(house.inside) == 8 * bunch, "they came in")
    assert house.waiting.estimate_s == pytest.approx(0.5)  # a new client waits for one turn
    house.now += 3.9
    with pytest.raises(NotAdmitted, match="160 wait already, this one would wait about ") as refused:
        await house.guest("late", "a")
    assert 15 <= refused.value.retry_after_s <= 40
    with pytest.raises(NotAdmitted, match=r"and may wait 0\.2 s"):
        await house.guest("hurried", "b", deadline=house.now + 0.2)
    for guest in guests:
        guest.cancel()
    await until(lambda: len(house.waiting) == 0, "all gave up")


@pytest.mark.parametrize("seed", range(5))
async def test_everybody_comes_in_or_has_given_up(seed):
    rng = random.Random(seed)
    house = House(limit=1000)
    guests = []
    for number in range(200):
        deed = rng.random()
        if deed < 0.6:
            guests.append(house.guest(str(number), rng.choice("abc"), tenant=rng.choice("xy")))
        elif deed < 0.65:
            guests.append(house.back(str(number)))
        elif deed < 0.8 and guests:
            rng.choice(guests).cancel()
        else:
            house.leave()
        await asyncio.sleep(0)
    while not all(guest.done() for guest in guests):
        house.leave()
        await asyncio.sleep(0)
    came = [guest for guest in guests if not guest.cancelled()]
    assert len(house.inside) == len(set(house.inside)) >= len(came)
    assert len(house.waiting) == 0


BATCH = next(one for one in Classes() if one.name == "batch")


async def test_those_that_go_first_do_not_stand_behind_others():
    house = House()
    flood = [house.guest(f"b{number}", service=BATCH) for number in range(10)]
    await waiting(house, *flood)
    first = [house.guest(f"a{number}") for number in range(3)]
    await waiting(house, *flood, *first)
    for _ in range(3):
        house.leave()
    await asyncio.gather(*first)
    assert house.inside == ["a0", "a1", "a2"]
    house.leave(10)
    await asyncio.gather(*flood)
    assert house.inside[3:] == [f"b{number}" for number in range(10)]


async def test_the_last_rooms_are_kept_for_those_that_go_first():
    house = House(rooms=3)
    house.kept = 1
    for number in range(5):
        house.guest(f"b{number}", service=BATCH)
    await until(lambda: len(house.waiting) == 3, "two are in")
    await house.guest("a")  # at once, although others wait
    assert house.inside == ["b0", "b1", "a"]


async def test_a_class_with_less_than_its_share_is_owed_a_place():
    """Every tenth placement is its own, even of the rooms reserved for others."""
    house = House(rooms=9)
    house.kept = 100
    await asyncio.gather(*(house.guest(f"a{number}") for number in range(9)))
    flood = [house.guest(f"b{number}", service=BATCH) for number in range(5)]
    others = [house.guest(f"c{number}") for number in range(30)]
    await waiting(house, *flood, *others)
    await house.refill(20)
    assert sum(name.startswith("b") for name in house.inside) == 2  # of 29
    house.waiting.left(BATCH)
    await house.refill()
    assert house.inside[-1] == "b2"


async def test_nobody_waits_longer_than_its_class_has_patience():
    """With few rooms its share is less than one."""
    house = House(rooms=2)
    await asyncio.gather(house.guest("a0"), house.guest("a1"))
    batch = house.guest("b", service=BATCH)
    others = [house.guest(f"c{number}") for number in range(3)]
    await waiting(house, batch, *others)
    await house.refill()
    assert house.inside[-1] == "c0"
    house.now = BATCH.patience_s
    house.leave()
    await house.refill()
    assert "b" in house.inside


async def test_what_is_owed_does_not_stop_the_others_for_long():
    """The request that is owed a place may be too large."""
    house = House()

    async def too_large(service):
        del service
        raise FULL

    large = asyncio.create_task(house.waiting.admit(Party(), 1e9, too_large, BATCH))
    await waiting(house, large)
    other = house.guest("b")
    await waiting(house, large, other)
    house.now = BATCH.patience_s
    house.waiting._choose()
    house.leave()
    await asyncio.sleep(0)
    assert house.inside == []
    house.now += OWED_S + 0.1
    house.waiting.freed()
    await other


async def lodging(*, rooms):
    """Return a house full of the first class, in which the next place is owed to batch."""
    house = House(rooms=rooms)
    house.kept = 100
    await asyncio.gather(*(house.guest(f"a{number}") for number in range(rooms)))
    return house


async def left_while_owed(house, after_s):
    """Let a batch request that is owed a place give up."""
    gone = house.guest("gone", service=BATCH)
    await waiting(house, gone)
    house.now += after_s
    gone.cancel()
    await until(lambda: len(house.waiting) == 0, "it gave up")


async def test_a_class_whose_requests_gave_up_is_owed_a_place_when_it_waits_again():
    house = await lodging(rooms=9)
    await left_while_owed(house, 0.5)
    house.now += 3600.0
    batch, other = house.guest("b", service=BATCH), house.guest("c")
    await waiting(house, batch, other)
    await house.refill()
    assert house.inside[-1] == "b"


async def test_a_class_that_gives_up_and_comes_back_does_not_go_first_for_longer():
    """Giving up neither extends its precedence nor shortens its rest."""
    house = await lodging(rooms=9)
    for _ in range(3):
        await left_while_owed(house, 0.9 * OWED_S)
    batch, other = house.guest("b", service=BATCH), house.guest("c")
    await waiting(house, batch, other)
    await house.refill()
    assert house.inside[-1] == "c"


async def test_a_flood_does_not_take_the_whole_queue():
    house = House(limit=4)
    flood = [house.guest(f"b{number}", service=BATCH) for number in range(3)]
    await waiting(house, *flood)
    with pytest.raises(NotAdmitted, match=r"3 wait already .*1 places are reserved for classes before batch"):
        await house.guest("b3", service=BATCH)
    last = house.guest("a")
    await waiting(house, *flood, last)
    with pytest.raises(NotAdmitted, match="4 wait already"):
        await house.guest("a1")
    assert house.registry.get_sample_value("baton_router_class_waiting_requests", {"class": "batch"}) == 3
