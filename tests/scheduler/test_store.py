"""The interface of stores, for each kind."""

import pytest

from baton.scheduler.store.base import TOLD_KINDS
from harness.scheduling import LEASE_S, until


async def test_messages_are_kept_by_kind_for_their_lease(store):
    await store.tell("router", "r:é\n", b"old", LEASE_S)
    for kind in TOLD_KINDS:  # several kinds may have the same name
        assert await store.tell(kind, "r:é\n", f"\x00:{kind}".encode(), LEASE_S) == b""
    await store.tell("process", "short", b"gone", 0.02)
    await store.tell("process", "renewed", b"new", 0.02)
    await store.tell("process", "renewed", b"new", LEASE_S)

    async def forgotten():
        return "short" not in (await store.told()).processes

    await until(forgotten)
    told = await store.told()
    by_kind = dict(zip(TOLD_KINDS, (told.routers, told.fleets, told.processes, told.turns), strict=True))
    more = {"process": {"renewed": b"new"}}
    assert by_kind == {kind: {"r:é\n": f"\x00:{kind}".encode()} | more.get(kind, {}) for kind in TOLD_KINDS}
    assert not told.orders


async def test_one_scheduler_leads_and_the_next_has_a_higher_fence(store):
    first = await store.lead("a", LEASE_S)
    assert first > 0
    assert await store.lead("b", LEASE_S) == 0
    assert await store.lead("a", 0.05) == first  # renewed
    await until(lambda: store.lead("b", LEASE_S))
    assert await store.lead("b", LEASE_S) > first
    assert await store.lead("a", LEASE_S) == 0


async def test_orders_with_an_old_fence_are_refused(store):
    first = await store.lead("a", LEASE_S)
    assert await store.order(first, {"f": b"one", "g": b"two"})
    assert await store.tell("fleet", "f", b"here", LEASE_S) == b"one"
    assert await store.tell("fleet", "new", b"here", LEASE_S) == b""
    assert await store.tell("router", "f", b"here", LEASE_S) == b""
    assert await store.lead("a", 0.02) == first
    await until(lambda: store.lead("b", LEASE_S))
    assert not await store.order(first, {"f": b"late"})
    assert (await store.told()).orders == {"f": b"one", "g": b"two"}
    assert await store.order(await store.lead("b", LEASE_S), {"f": b"three"})
    assert (await store.told()).orders == {"f": b"three"}


@pytest.mark.parametrize("name", ["w", "wörker {1}:\n"])
async def test_drain_and_undrain(store, name):
    await store.open()
    for _ in range(2):
        assert [await store.drain(name) for _ in range(2)] == [True, False]
        await store.tend()
        assert store.drained == {name}
        assert not await store.drain("another", undo=True)
        assert [await store.drain(name, undo=True) for _ in range(2)] == [True, False]
        await store.tend()
        assert store.drained == frozenset()
    assert not store.problem
