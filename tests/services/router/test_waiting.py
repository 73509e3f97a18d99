import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry

from baton.services.classes import STANDARD, Classes
from baton.services.router.errors import NotAdmitted, Why
from baton.services.router.metrics import RouterMetrics
from baton.services.router.state import NOBODY, Party
from baton.services.router.waiting import OWED_S, WaitingRoom
from harness.fake_worker import until

FULL = NotAdmitted("all are full", Why.FULL, 1.0)
BATCH = next(one for one in Classes() if one.name == "batch")


class House:
    """A number of rooms, a waiting room for requests (guests), and the order in which they were placed."""

    def __init__(self, rooms=0, limit=100, wait_s=15.0, kept=0):
        self.rooms = rooms
        self.kept = kept  # rooms reserved for the first class
        self.now = 0.0
        self.inside = []
        self.asked = 0
        self.registry = CollectorRegistry()
        self.waiting = WaitingRoom(limit, wait_s, RouterMetrics(self.registry), clock=lambda: self.now)

    def guest(self, name, client="", deadline=1e9, tenant="", weight=1, service=STANDARD):
        party = Party(tenant, client, weight)
        return asyncio.create_task(self.waiting.admit(party, deadline, self._door(name), service))

    def back(self, name, wait_s=15.0):
        return asyncio.create_task(self.waiting.resume(wait_s, self._door(name)))

    async def queue(self, *names, **how):
        return await self.wait_for([self.guest(name, **how) for name in names])

    async def wait_for(self, guests):
        count = len(self.waiting) + len(guests)
        await until(lambda: len(self.waiting) == count, f"{count} wait")
        return guests

    def leave(self, rooms=1):
        self.rooms += rooms
        self.waiting.freed()

    async def refill(self, rooms=1):
        self.leave(rooms)
        await until(lambda: self.rooms == 0, "the rooms are taken")

    def shown(self, of, **labels):
        return self.registry.get_sample_value(f"baton_router_{of}_waiting_requests", labels)

    def _door(self, name):
        async def place(service):
            self.asked += 1
            await asyncio.sleep(0)
            if self.rooms <= (self.kept if service.room < 1 else 0):
                raise FULL
            self.rooms -= 1
            self.inside.append(name)

        return place


def names(letter, count):
    return [f"{letter}{number}" for number in range(count)]


async def gone(house, guests):
    for guest in guests:
        guest.cancel()
    await until(lambda: len(house.waiting) == 0, "all gave up")


async def test_clients_take_turns():
    house = House()
    guests = await house.queue(*names("a", 4), client="a")
    guests += await house.queue("b0", "b1", client="b") + await house.queue("c0", client="c")
    house.leave(7)
    await asyncio.gather(*guests)
    assert house.inside == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


async def test_tenants_take_turns_by_their_weight():
    """The numbers of their clients and requests do not matter."""
    house = House()
    flood = [house.guest(f"a{number}", f"client {number % 3}", tenant="a") for number in range(8)]
    guests = await house.wait_for(flood)
    guests += await house.queue(*names("b", 4), tenant="b", weight=2)
    assert house.shown("tenant", tenant="b") == 4
    house.leave(12)
    await asyncio.gather(*guests)
    assert house.inside == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3", "a4", "a5", "a6", "a7"]
    assert house.shown("tenant", tenant="b") == 0


async def test_a_returning_tenant_has_no_extra_turns():
    house = House()
    await house.queue(*names("a", 12), tenant="a", weight=3)
    for number in range(4):
        [last] = await house.queue(f"b{number}", tenant="b")
        while not last.done():
            await house.refill()
            await asyncio.sleep(0)
    turns = "".join(one[0] for one in house.inside)
    assert turns.count("b") == 4
    assert "bb" not in turns
    assert turns[turns.index("b") : turns.rindex("b")].count("a") >= 3 * 3 - 1


async def test_resuming_requests_go_before_new_ones():
    house = House()
    guests = await house.queue("first", "second")  # the first one has the turn
    guests += await house.wait_for([house.back("lost"), house.back("lost, too")])
    guests += await house.queue("late", client="another")
    house.leave(5)
    await asyncio.gather(*guests)
    assert house.inside == ["lost", "lost, too", "first", "late", "second"]
    assert len(house.waiting) == 0


async def test_a_resuming_request_ignores_the_queue_limit_but_not_its_time_limit():
    house = House(limit=0)
    [back] = await house.wait_for([house.back("lost")])
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


@pytest.mark.parametrize("resumes", [True, False])
async def test_a_final_refusal_ends_the_wait(resumes):
    house = House()
    final = NotAdmitted("too large", Why.TOO_LARGE)

    async def place(_):
        raise final if len(house.waiting) else FULL

    waiting = house.waiting.resume(15.0, place) if resumes else house.waiting.admit(NOBODY, 1e9, place)
    with pytest.raises(NotAdmitted) as refused:
        await waiting
    assert refused.value is final


async def test_no_request_overtakes_those_that_wait():
    house = House()
    guests = await house.queue("first")
    house.rooms = 1  # `freed` is not called
    guests += await house.queue("second")
    house.leave(1)
    await asyncio.gather(*guests)
    assert house.inside == ["first", "second"]


async def test_only_one_asks_again():
    """The cost of a release does not depend on the number of waiting requests."""
    house = House(limit=1000)
    guests = await house.queue(*names("a", 500))
    await until(lambda: house.asked > 500, "the first in turn asks again")
    before = house.asked
    house.leave()
    await until(lambda: house.inside, "one came in")
    assert house.asked - before <= 4  # the one placed, the next one, and timed retries
    await gone(house, guests)


async def test_room_freed_by_other_routers_is_found():
    house = House()
    [guest] = await house.queue("a")
    house.rooms = 1
    await guest


async def test_the_queue_is_bounded():
    house = House(limit=2)
    guests = await house.queue("a", "b")
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
    with pytest.raises(NotAdmitted, match=r"within 0.1 s \(half of router.request_timeout_s\).*all are full"):
        await house.guest("a")
    assert len(house.waiting) == 0


async def test_the_expected_wait_refuses_early():
    """If 8 requests end together every 4 s, the pace is one per 0.5 s."""
    house = House(limit=1000, wait_s=60)
    guests = await house.queue(*names("a", 200), client="a")
    assert house.waiting.estimate_s == 0.0  # unknown
    for _ in range(5):
        house.now += 4
        await house.refill(8)
    await until(lambda: len(house.waiting) == 160, "they have left the queue")
    assert house.waiting.estimate_s == pytest.approx(0.5)  # a new client waits for one turn
    house.now += 3.9
    with pytest.raises(NotAdmitted, match="160 wait already, this one would wait about ") as refused:
        await house.guest("late", "a")
    assert 15 <= refused.value.retry_after_s <= 40
    with pytest.raises(NotAdmitted, match=r"and may wait 0\.2 s"):
        await house.guest("hurried", "b", deadline=house.now + 0.2)
    await gone(house, guests)


@pytest.mark.parametrize("seed", range(5))
async def test_every_request_is_placed_or_has_given_up(seed):
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


async def test_a_higher_class_goes_first():
    house = House()
    flood = await house.queue(*names("b", 10), service=BATCH)
    first = await house.queue(*names("a", 3))
    for _ in range(3):
        house.leave()
    await asyncio.gather(*first)
    assert house.inside == ["a0", "a1", "a2"]
    house.leave(10)
    await asyncio.gather(*flood)
    assert house.inside[3:] == names("b", 10)


async def test_the_last_rooms_are_kept_for_the_first_class():
    house = House(rooms=3, kept=1)
    for name in names("b", 5):
        house.guest(name, service=BATCH)
    await until(lambda: len(house.waiting) == 3, "two are in")
    await house.guest("a")  # placed at once, although others wait
    assert house.inside == ["b0", "b1", "a"]


async def lodging(rooms, kept=100):
    """Return a house full of the first class, in which the next place is owed to batch."""
    house = House(rooms, kept=kept)
    await asyncio.gather(*(house.guest(name) for name in names("a", rooms)))
    return house


async def test_a_class_below_its_share_is_owed_a_place():
    """Every tenth placement is its own, even of the rooms reserved for others."""
    house = await lodging(9)
    await house.queue(*names("b", 5), service=BATCH)
    await house.queue(*names("c", 30))
    await house.refill(20)
    assert sum(name.startswith("b") for name in house.inside) == 2  # out of 29
    house.waiting.left(BATCH)
    await house.refill()
    assert house.inside[-1] == "b2"


async def test_a_class_goes_first_after_its_patience():
    """With few rooms its share is less than one."""
    house = await lodging(2, kept=0)
    await house.queue("b", service=BATCH)
    await house.queue(*names("c", 3))
    await house.refill()
    assert house.inside[-1] == "c0"
    house.now = BATCH.patience_s
    house.leave()
    await house.refill()
    assert "b" in house.inside


async def test_an_owed_turn_stops_the_others_only_for_a_while():
    """The request that is owed a place may be too large."""
    house = House()

    async def too_large(_):
        raise FULL

    await house.wait_for([asyncio.create_task(house.waiting.admit(NOBODY, 1e9, too_large, BATCH))])
    [other] = await house.queue("b")
    house.now = BATCH.patience_s
    house.waiting._choose()
    house.leave()
    await asyncio.sleep(0)
    assert house.inside == []
    house.now += OWED_S + 0.1
    house.waiting.freed()
    await other


@pytest.mark.parametrize(
    ("times", "waits_s", "away_s", "next_one"), [(1, 0.5, 3600.0, "b"), (3, 0.9 * OWED_S, 0.0, "c")]
)
async def test_giving_up_neither_extends_a_class_s_precedence_nor_shortens_its_rest(
    times, waits_s, away_s, next_one
):
    """If a class's requests give up while it is owed a place, it is owed one again after its rest."""
    house = await lodging(9)
    for _ in range(times):
        guests = await house.queue("gone", service=BATCH)
        house.now += waits_s
        await gone(house, guests)
    house.now += away_s
    await house.wait_for([house.guest("b", service=BATCH), house.guest("c")])
    await house.refill()
    assert house.inside[-1] == next_one


async def test_a_flood_does_not_take_the_whole_queue():
    house = House(limit=4)
    await house.queue(*names("b", 3), service=BATCH)
    with pytest.raises(NotAdmitted, match=r"3 wait already .*1 places are reserved for classes before batch"):
        await house.guest("b3", service=BATCH)
    await house.queue("a")
    with pytest.raises(NotAdmitted, match="4 wait already"):
        await house.guest("a1")
    assert house.shown("class", **{"class": "batch"}) == 3
