"""One suite for all stores."""

from __future__ import annotations

from baton.attempts import Attempt
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.keys import HANDOFFS_KEPT
from baton.scheduler.store import Store
from baton.scheduler.types import Heard, Reserved, ReserveOutcome
from harness.scheduling import LEASE_S, claim_on, identity, need, register, report, until

BOOKED, STALE = ReserveOutcome.BOOKED, ReserveOutcome.STALE
GONE, FULL = ReserveOutcome.GONE, ReserveOutcome.FULL
READY, DRAINING = pb.WORKER_STATE_READY, pb.WORKER_STATE_DRAINING


async def pair(store: Store) -> None:
    await register(store, "p", pb.ROLE_PREFILL)
    await register(store, "d", pb.ROLE_DECODE)


async def booked(store: Store) -> dict[str, Reserved]:
    view = await store.view()
    return {key: worker.reserved for key, worker in view.workers.items()}


async def reserve(
    store: Store, what: object, decode: str = "d", prefill: str = "p", lease_s: float = LEASE_S
) -> object:
    claim = claim_on(await store.view(), what, decode, prefill)  # type: ignore[arg-type]
    return (await store.reserve(claim, lease_s)).outcome


async def test_a_registered_worker_is_seen_as_it_is(store: Store) -> None:
    await register(store, "p", pb.ROLE_PREFILL)
    view = await store.view()
    worker = view.workers["p"]
    assert worker.identity == identity("p", pb.ROLE_PREFILL)
    assert worker.load is None
    assert worker.placeable
    assert worker.reserved == Reserved()
    assert LEASE_S - 5 < worker.lease_left_s <= LEASE_S
    counts = pb.EngineCounts(prefix_queries=2**40, prefix_hits=64, accepted_by_position=[5, 0, 3])
    load = pb.WorkerLoad(running=3, free_blocks=17, counts=counts)
    assert await store.heartbeat("p", DRAINING, load, LEASE_S) == Heard(known=True, drain=False)
    worker = (await store.view()).workers["p"]
    assert worker.load == load
    assert not worker.placeable


async def test_registering_again_replaces_the_identity(store: Store) -> None:
    bare = identity("w")
    bare.ClearField("capacity")
    assert await store.register(bare, pb.WORKER_STATE_STARTING, LEASE_S) == ""
    assert not (await store.view()).workers["w"].placeable
    await register(store, "w")
    worker = (await store.view()).workers["w"]
    assert worker.placeable
    assert worker.capacity.num_blocks == 100


async def test_an_export_does_not_hide_a_new_identity_from_the_next_view(store: Store) -> None:
    """Copies for a spare are taken between two views: each of the two has its own idea of what is known."""
    bare = identity("w", pb.ROLE_PREFILL)
    bare.ClearField("capacity")
    assert await store.register(bare, pb.WORKER_STATE_STARTING, LEASE_S) == ""
    assert not (await store.view()).of(pb.ROLE_DECODE)
    await register(store, "w", pb.ROLE_DECODE)
    await store.export()
    view = await store.view()
    assert view.workers["w"].capacity.num_blocks == 100
    assert [one.worker_id for one in view.of(pb.ROLE_DECODE)] == ["w"]
    assert not view.of(pb.ROLE_PREFILL)


def serving(model: str, worker_id: str) -> pb.WorkerIdentity:
    one = identity(worker_id)
    one.model = model
    return one


async def test_who_serves_another_model_is_refused_by_name(store: Store, topic: str) -> None:
    await register(store, "first")
    refusal = await store.register(serving("large", "other"), READY, LEASE_S)
    assert refusal == f"model 'large' here, 'tiny' in topic {topic!r} (worker first): serve one model a topic"
    assert set((await store.view()).workers) == {"first"}


async def test_other_revisions_and_versions_may_come_beside_those_that_are_there(store: Store) -> None:
    await register(store, "old")
    await register(store, "weights", fingerprint="f2")
    await register(store, "vllm", vllm="0.33.0")
    workers = (await store.view()).workers
    assert {
        key: (one.identity.model_fingerprint, one.identity.vllm_version) for key, one in workers.items()
    } == {
        "old": ("f1", "0.32.0"),
        "weights": ("f2", "0.32.0"),
        "vllm": ("f1", "0.33.0"),
    }


async def test_the_last_worker_gone_another_model_may_come(store: Store) -> None:
    await register(store, "old")
    await store.deregister("old")
    assert await store.register(serving("second", "short"), READY, 0.02) == ""

    async def accepted() -> bool:
        return await store.register(serving("third", "new"), READY, LEASE_S) == ""

    await until(accepted)  # as soon as the lease of "short" has run out
    assert "'tiny' here, 'third'" in await store.register(identity("old"), READY, LEASE_S)


async def test_a_worker_alone_in_its_topic_may_come_back_as_another(store: Store) -> None:
    for model in ("first", "second"):
        assert await store.register(serving(model, "w"), READY, LEASE_S) == ""
    assert "'first' here, 'second'" in await store.register(serving("first", "v"), READY, LEASE_S)
    assert await store.register(serving("second", "v"), READY, LEASE_S) == ""
    assert "'third' here, 'second'" in await store.register(serving("third", "w"), READY, LEASE_S)


async def test_a_worker_not_heard_of_is_gone_and_unknown(store: Store) -> None:
    await store.register(identity("w"), READY, 0.02)

    async def gone() -> bool:
        return not (await store.view()).workers

    await until(gone)
    assert await store.heartbeat("w", READY, pb.WorkerLoad(), LEASE_S) == Heard(known=False, drain=False)
    assert not (await store.view()).workers


async def test_heartbeats_hold_a_worker(store: Store) -> None:
    await store.register(identity("w"), READY, 0.2)
    await store.register(identity("silent"), READY, 0.2)
    assert (await store.heartbeat("w", READY, pb.WorkerLoad(), LEASE_S)).known

    async def silent_gone() -> bool:
        return "silent" not in (await store.view()).workers

    await until(silent_gone)
    assert "w" in (await store.view()).workers


async def test_drain_is_told_and_stops_placements(store: Store) -> None:
    await pair(store)
    claim = claim_on(await store.view(), need(), "d", "p")
    assert await store.drain("d")
    assert (await store.heartbeat("d", READY, pb.WorkerLoad(), LEASE_S)).drain
    assert not (await store.heartbeat("p", READY, pb.WorkerLoad(), LEASE_S)).drain
    assert not (await store.view()).workers["d"].placeable
    result = await store.reserve(claim, LEASE_S)
    assert (result.outcome, result.detail) == (GONE, "d")
    await register(store, "d", pb.ROLE_DECODE)  # known again by itself, still to drain
    assert not (await store.view()).workers["d"].placeable


async def test_a_drain_lasts_over_a_workers_lives_until_it_is_undone(store: Store) -> None:
    async def comes(worker_id: str) -> bool:
        one = identity(worker_id)
        one.name = "w"
        assert await store.register(one, READY, LEASE_S) == ""
        assert (await store.view()).workers[worker_id].placeable is not await drain_told(worker_id)
        return await drain_told(worker_id)

    async def drain_told(worker_id: str) -> bool:
        return (await store.heartbeat(worker_id, READY, pb.WorkerLoad(), LEASE_S)).drain

    assert not await comes("w.1")
    assert [await store.drain("w") for _ in range(2)] == [True, False]
    assert await drain_told("w.1")
    await store.deregister("w.1")
    assert (await store.view()).drained == {"w"}  # though nobody of that name is there
    assert await comes("w.2")
    await register(store, "other")
    assert (await store.view()).workers["other"].placeable
    result = await store.reserve(claim_on(await store.view(), need(), "w.2"), LEASE_S)
    assert (result.outcome, result.detail) == (GONE, "w.2")
    assert [await store.drain("w", undo=True) for _ in range(2)] == [True, False]
    assert not await drain_told("w.2")
    assert (await store.view()).workers["w.2"].placeable
    assert (await store.view()).drained == frozenset()
    assert await store.drain("w")  # again
    assert await comes("w.3")


async def test_a_pair_is_booked_and_released_side_by_side(store: Store) -> None:
    await pair(store)
    assert await reserve(store, need(prompt=100, new=10)) is BOOKED
    # 100 tokens of prompt, 4 of look-ahead, 10 of answer: 8 blocks of 16
    assert await booked(store) == {"p": Reserved(100, 1, 0), "d": Reserved(0, 1, 8)}
    one = Attempt("r", 1)
    for _ in range(2):  # told twice, counted once
        await store.report(report(prefilled=[one]), LEASE_S)
        assert await booked(store) == {"p": Reserved(), "d": Reserved(0, 1, 8, 1)}
    for _ in range(2):
        await store.report(report(finished=[one]), LEASE_S)
        assert await booked(store) == {"p": Reserved(), "d": Reserved()}
    assert (await store.view()).live_attempts == 0


async def test_only_what_an_attempt_booked_is_released(store: Store) -> None:
    await pair(store)
    for name in ("other", "pair", "direct"):
        assert await reserve(store, need(name, prompt=100, new=10)) is BOOKED
    for _ in range(2):
        await store.report(report(prefilled=[Attempt("pair", 1)]), LEASE_S)
        assert await booked(store) == {"p": Reserved(200, 2, 0), "d": Reserved(0, 3, 24, 1)}
    for _ in range(2):
        await store.report(report(finished=[Attempt("pair", 1)]), LEASE_S)
        assert await booked(store) == {"p": Reserved(200, 2, 0), "d": Reserved(0, 2, 16)}
    await store.report(report(finished=[Attempt("direct", 1)]), LEASE_S)
    assert await booked(store) == {"p": Reserved(100, 1, 0), "d": Reserved(0, 1, 8)}


async def test_blocks_that_others_hold_are_not_booked_twice(store: Store) -> None:
    """Told twice, or too late, or after it was told again by its router: no block is given back twice."""
    await pair(store)
    for name in ("first", "second"):
        assert await reserve(store, need(name, prompt=100, new=10)) is BOOKED
    second = Attempt("second", 1)
    for blocks in (3, 3, 5):  # that are left of 8; a later word never books more
        await store.report(report(shared=[(second, blocks)]), LEASE_S)
        assert (await booked(store))["d"] == Reserved(0, 2, 8 + 3)
    known = {one.attempt: one for one in (await store.export()).requests}
    assert known[second].booking is not None
    assert known[second].booking.blocks == 3
    await store.report(report(finished=[Attempt("first", 1)]), LEASE_S)
    assert (await booked(store))["d"] == Reserved(0, 1, 3)
    await store.report(report(finished=[second], shared=[(second, 0)]), LEASE_S)
    assert await booked(store) == {"p": Reserved(), "d": Reserved()}


async def test_finished_before_prefilled_releases_both(store: Store) -> None:
    await pair(store)
    await reserve(store, need())
    await store.report(report(finished=[Attempt("r", 1)]), LEASE_S)
    assert await booked(store) == {"p": Reserved(), "d": Reserved()}


async def test_a_worker_alone_reads_and_writes(store: Store) -> None:
    await register(store, "m")
    assert await reserve(store, need(prompt=100, new=10), "m", "") is BOOKED
    assert await booked(store) == {"m": Reserved(100, 1, 8)}
    await store.report(report(prefilled=[Attempt("r", 1)]), LEASE_S)
    assert await booked(store) == {"m": Reserved(0, 1, 8, 1)}
    await store.report(report(finished=[Attempt("r", 1)]), LEASE_S)
    assert await booked(store) == {"m": Reserved()}


async def test_queued_prompt_tokens_are_limited_but_for_an_idle_reader(store: Store) -> None:
    await pair(store)
    await register(store, "d2", pb.ROLE_DECODE, max_model_len=4_096, num_blocks=1_000)
    assert await reserve(store, need("giant", prompt=3_000), "d2") is BOOKED
    assert await reserve(store, need("tiny", prompt=1), "d") is FULL
    await store.report(report(prefilled=[Attempt("giant", 1)]), LEASE_S)
    assert await reserve(store, need("a", prompt=600), "d") is BOOKED
    assert await reserve(store, need("b", prompt=401), "d2") is FULL
    assert await reserve(store, need("b", prompt=400), "d2") is BOOKED


async def test_requests_and_blocks_of_the_decode_worker_are_limited(store: Store) -> None:
    await pair(store)
    for number in range(8):  # max_num_seqs 4, twice
        assert await reserve(store, need(f"r{number}", prompt=1, new=1)) is BOOKED
    assert await reserve(store, need("one-more", prompt=1, new=1)) is FULL
    await store.report(report(finished=[Attempt(f"r{number}", 1) for number in range(8)]), LEASE_S)
    assert await reserve(store, need("long", prompt=996, new=0)) is BOOKED  # 63 of 99 blocks
    await store.report(report(prefilled=[Attempt("long", 1)]), LEASE_S)
    assert await reserve(store, need("more", prompt=573, new=0)) is FULL  # 37
    assert await reserve(store, need("less", prompt=572, new=0)) is BOOKED  # 36


async def test_a_refused_claim_changes_nothing(store: Store) -> None:
    await pair(store)
    view = await store.view()
    await store.deregister("d")
    result = await store.reserve(claim_on(view, need(), "d", "p"), LEASE_S)
    assert (result.outcome, result.detail) == (GONE, "d")
    await register(store, "d", pb.ROLE_DECODE)
    assert await booked(store) == {"p": Reserved(), "d": Reserved()}
    assert await reserve(store, need()) is BOOKED  # its epoch is still free


async def test_epochs_only_rise(store: Store) -> None:
    await pair(store)
    assert await reserve(store, need(epoch=3)) is BOOKED
    view = await store.view()
    for epoch in (1, 3):
        result = await store.reserve(claim_on(view, need(epoch=epoch), "d", "p"), LEASE_S)
        assert (result.outcome, result.detail) == (STALE, "3")
    await store.report(report(finished=[Attempt("r", 3)]), LEASE_S)
    assert await reserve(store, need(epoch=3)) is STALE  # also once it is over
    assert await reserve(store, need(epoch=4)) is BOOKED


async def test_a_later_epoch_takes_the_earlier_ones_place(store: Store) -> None:
    await pair(store)
    await register(store, "d2", pb.ROLE_DECODE)
    await reserve(store, need(epoch=1), "d")
    assert await reserve(store, need(epoch=2), "d2") is BOOKED
    assert await booked(store) == {"p": Reserved(100, 1, 0), "d": Reserved(), "d2": Reserved(0, 1, 8)}
    assert (await store.view()).live_attempts == 1


async def test_reports_of_an_older_epoch_are_counted_and_ignored(store: Store) -> None:
    await pair(store)
    await reserve(store, need(epoch=1))
    await reserve(store, need(epoch=2))
    before = await booked(store)
    old = Attempt("r", 1)
    result = await store.report(report(prefilled=[old], finished=[old], renewed=[old]), LEASE_S)
    assert result.stale == 3
    assert (result.lost, result.fenced) == ([], [old])
    assert await booked(store) == before
    unknown = Attempt("never-seen", 1)
    result = await store.report(report(prefilled=[unknown], renewed=[unknown]), LEASE_S)
    assert (result.stale, result.lost) == (0, [unknown])


async def test_an_end_is_remembered_of_an_attempt_that_was_never_known(store: Store) -> None:
    """A router gave up waiting for its placement: the call may still come."""
    await pair(store)
    await reserve(store, need(epoch=1))
    gone = Attempt("r", 2)
    result = await store.report(report(finished=[gone], renewed=[gone]), LEASE_S)
    assert (result.stale, result.lost, result.fenced) == (0, [], [gone])
    assert await booked(store) == {"p": Reserved(), "d": Reserved()}
    assert await reserve(store, need(epoch=2)) is ReserveOutcome.STALE
    assert await reserve(store, need(epoch=3)) is BOOKED


async def test_a_reservation_not_renewed_runs_out(store: Store) -> None:
    await pair(store)
    await reserve(store, need("kept"))
    await reserve(store, need("short"), lease_s=0.02)
    expired = 0

    async def swept() -> bool:
        nonlocal expired
        view = await store.view()
        expired += view.expired
        return view.live_attempts == 1

    await until(swept)
    assert expired == 1
    assert await booked(store) == {"p": Reserved(100, 1, 0), "d": Reserved(0, 1, 8)}
    result = await store.report(report(renewed=[Attempt("short", 1), Attempt("kept", 1)]), LEASE_S)
    assert result.lost == [Attempt("short", 1)]
    assert await reserve(store, need("short", epoch=1)) is STALE


async def test_renewing_holds_a_reservation(store: Store) -> None:
    await pair(store)
    await reserve(store, need("renewed"), lease_s=0.2)
    await reserve(store, need("left"), lease_s=0.2)
    assert not (await store.report(report(renewed=[Attempt("renewed", 1)]), LEASE_S)).lost

    async def left_gone() -> bool:
        return (await store.view()).live_attempts < 2

    await until(left_gone)
    assert [one.attempt.request_id for one in (await store.history(9)).attempts] == ["renewed"]


async def test_reserving_sweeps_and_says_how_many(store: Store) -> None:
    await register(store, "m", max_num_seqs=1)
    view = await store.view()
    expired = 0

    async def swept(request_id: str, lease_s: float) -> bool:
        nonlocal expired
        expired += (await store.reserve(claim_on(view, need(request_id, prompt=1), "m"), lease_s)).expired
        return expired >= 2

    for number in range(2):  # on a machine that stands still for a moment the second one sweeps the first
        await swept(f"short{number}", 0.02)
    await until(lambda: swept("new", LEASE_S))  # booked once, then refused: that sweeps as well
    assert expired == 2
    assert (await store.view()).live_attempts == 1


async def test_bookings_outlive_their_workers_registration(store: Store) -> None:
    await pair(store)
    await reserve(store, need())
    await store.deregister("d")
    await register(store, "d", pb.ROLE_DECODE)
    assert (await booked(store))["d"] == Reserved(0, 1, 8)
    await store.deregister("d")
    await store.report(report(finished=[Attempt("r", 1)]), LEASE_S)
    await register(store, "d", pb.ROLE_DECODE)
    assert (await booked(store))["d"] == Reserved()


async def test_history_is_newest_first_and_bounded(store: Store) -> None:
    await pair(store)
    for number in range(HANDOFFS_KEPT + 5):
        one = need(f"r{number}", prompt=1)
        await reserve(store, one)
        await store.report(report(finished=[one.attempt]), LEASE_S)
    await reserve(store, need("earlier", prompt=1), lease_s=LEASE_S - 1)
    await reserve(store, need("later", prompt=1))
    await store.report(report(prefilled=[Attempt("later", 1)]), LEASE_S)
    history = await store.history(100)
    assert len(history.handoffs) == HANDOFFS_KEPT
    last = history.handoffs[0]
    assert last.attempt.request_id == f"r{HANDOFFS_KEPT + 4}"
    assert (last.prefill_worker_id, last.decode_worker_id, last.outcome) == ("p", "d", "stop")
    assert last.cost.output_tokens == 7
    assert 0 <= last.age_s < 5
    assert [one.attempt.request_id for one in history.attempts] == ["later", "earlier"]
    later = history.attempts[0]
    assert later.prefilled
    assert LEASE_S - 5 < later.lease_left_s <= LEASE_S
    assert len((await store.history(1)).attempts) == 1


async def test_ids_may_be_any_text(store: Store) -> None:
    await register(store, "wörker {1}:\n")
    what = need('r"\\é\x01')
    assert await reserve(store, what, "wörker {1}:\n", "") is BOOKED
    assert (await store.history(9)).attempts[0].attempt.request_id == what.attempt.request_id
    await store.report(report(finished=[what.attempt]), LEASE_S)
    assert (await store.history(9)).handoffs[0].decode_worker_id == "wörker {1}:\n"


async def test_of_many_one_has_its_turn(store: Store) -> None:
    turns = [await store.take_turn("balance", 0.2) for _ in range(3)]
    assert turns == [True, False, False]
    assert await store.take_turn("something else", LEASE_S)

    async def again() -> bool:
        return await store.take_turn("balance", LEASE_S)

    await until(again)  # the turn is over
    assert not await store.take_turn("balance", LEASE_S)


async def test_what_is_told_is_kept_for_its_lease(store: Store) -> None:
    assert await store.tell("router", "r", b"old", LEASE_S) == b""
    await store.tell("router", "r", b"new", LEASE_S)
    await store.tell("fleet", "r", b"\x00:\xff", LEASE_S)  # another kind may have the same name
    await store.tell("router", "short", b"gone", 0.02)

    async def forgotten() -> bool:
        return "short" not in (await store.told()).routers

    await until(forgotten)
    told = await store.told()
    assert (told.routers, told.fleets, told.orders) == ({"r": b"new"}, {"r": b"\x00:\xff"}, {})


async def test_one_decides_at_a_time_and_the_next_has_a_higher_fence(store: Store) -> None:
    first = await store.lead("a", LEASE_S)
    assert first > 0
    assert await store.lead("b", LEASE_S) == 0
    assert await store.lead("a", 0.05) == first  # renewed

    async def taken_over() -> int:
        return await store.lead("b", LEASE_S)

    await until(taken_over)
    second = await store.lead("b", LEASE_S)
    assert second > first
    assert await store.lead("a", LEASE_S) == 0


async def test_orders_of_one_that_decides_no_more_are_refused(store: Store) -> None:
    first = await store.lead("a", LEASE_S)
    assert await store.order(first, {"f": b"one", "g": b"two"})
    assert await store.tell("fleet", "f", b"here", LEASE_S) == b"one"
    assert await store.tell("fleet", "new", b"here", LEASE_S) == b""
    assert await store.tell("router", "f", b"here", LEASE_S) == b""
    assert await store.lead("a", 0.02) == first

    async def taken_over() -> int:
        return await store.lead("b", LEASE_S)

    await until(taken_over)
    assert not await store.order(first, {"f": b"late"})
    assert (await store.told()).orders == {"f": b"one", "g": b"two"}
    second = await store.lead("b", LEASE_S)
    assert await store.order(second, {"f": b"three"})
    assert (await store.told()).orders == {"f": b"three"}
