import asyncio
import contextlib
import random

import pytest

from baton.services.router.errors import Overloaded
from baton.services.router.media.processes import Store, Turns


async def test_clients_take_turns_and_one_leaves_a_slot_to_others():
    turns, order = Turns(3, 2, 100), []
    ends = asyncio.Event()

    async def use(client):
        async with turns.turn(client):
            order.append(client)
            await ends.wait()

    tasks = [asyncio.create_task(use(client)) for client in "aaaaaabbc"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a", "a", "b"]
    ends.set()
    await asyncio.gather(*tasks)
    assert order.index("c") < 6
    assert len(order) == 9
    assert (turns._free, turns._room, dict(turns._taken), dict(turns._queues)) == (3, 100, {}, {})


async def test_too_many_waiters():
    turns = Turns(1, 1, 2)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(turns.turn("a"))
        waiting = [asyncio.create_task(stack.enter_async_context(turns.turn("a"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="too many requests with images"):
            await turns._take("b")
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    assert turns._room == 2


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_whoever_leaves_when(seed):
    chance = random.Random(seed)
    turns, store = Turns(3, 2, 1000), Store(10)

    async def use():
        async with turns.turn(chance.choice("abc")):
            units = chance.randint(0, 10)
            await store.take(units)
            try:
                for _ in range(chance.randint(0, 3)):
                    await asyncio.sleep(0)
            finally:
                store.give(units)

    tasks = [asyncio.create_task(use()) for _ in range(60)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        chance.choice(tasks).cancel()
        assert turns._free >= 0 <= store.free
    assert (turns._free, turns._room, store.free, dict(turns._queues)) == (3, 1000, 10, {})
    assert not store._waiting
