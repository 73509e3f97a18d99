"""One request's life over real gRPC, with workers that fail on demand."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
import time
import weakref
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from baton.protos import scheduler_pb2 as pb
from baton.protos.worker_pb2 import PHASE_DECODE, PHASE_PREFILL, Failed, Phase
from baton.scheduler.booking import Assignment
from baton.scheduler.client import Placement
from baton.scheduler.need import Need
from baton.scheduler.placer import Placer
from baton.scheduler.policy import NoChoice, Policy
from baton.services import logs
from baton.services.engine.args import VLLM_VERSION
from baton.services.router import placement, pool, relay, stream
from baton.services.router.http.admission import Admission, current_admission
from baton.services.router.record import usage_of
from baton.services.router.recovery import SHORT_PROMPT_TOKENS
from baton.services.router.relay import Relay
from baton.services.router.timings import HttpTimes
from baton.services.router.vllm.engine_client import RefusedByRouter
from harness.fake_worker import BLOCK_SIZE, EOS, FakeWorker, Fault, answer, until
from harness.router import Answer, Cluster
from harness.scheduling import need
from harness.support import PATIENCE

PROMPT = [5, 6, 7]
LONG = [1] * (SHORT_PROMPT_TOKENS + 1)


def refused(got: Answer, because: str) -> int:
    """Return the status of a request that got nothing but an error."""
    assert got.tokens == []
    assert isinstance(got.error, RefusedByRouter)
    assert re.search(because, str(got.error))
    return int(got.error.http_status)


def right(got: Answer, prompt: list[int], count: int) -> None:
    assert got.error is None
    assert got.tokens == answer(prompt, count)
    assert got.reason == "length"


async def test_prefill_then_decode(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    right(await cluster.ask(PROMPT), PROMPT, 8)
    [first], [second] = prefill.seen.starts, decode.seen.starts
    assert (first.phase, list(first.output_token_ids), first.HasField("source")) == (
        PHASE_PREFILL,
        [],
        False,
    )
    assert (second.phase, list(second.output_token_ids)) == (PHASE_DECODE, [])
    source = second.source
    assert (source.worker_id, source.address) == (prefill.worker_id, prefill.address)
    assert (source.request_id, source.tokens) == (first.request_id, len(PROMPT))
    assert len(source.key) == 16
    assert (source.key, second.key) == (first.key, b"")
    assert second.epoch == first.epoch == 1
    assert second.engine_request == first.engine_request
    await cluster.settled()
    assert prefill.seen.aborts == decode.seen.aborts == []
    [handoff] = (await cluster.scheduler.describe()).handoffs
    assert handoff.outcome == "length"
    assert handoff.cost.output_tokens == 8
    assert handoff.cost.transport == "shm"
    assert handoff.cost.decode_ms >= 0 < handoff.cost.prefill_ms


@pytest.mark.parametrize("aborted", [False, True])
async def test_nothing_of_an_ended_request_waits_for_the_garbage_collector(
    cluster: Cluster, aborted: bool
) -> None:
    """Its prompt and tokens are freed as it ends: the journal does not count them any more."""
    await cluster.pair(step_s=0.05)
    gc.disable()
    try:
        await cluster.send("q", PROMPT)
        await until(lambda: cluster.got["q"].tokens, "the first token is there")
        [relay] = [weakref.ref(one) for one in gc.get_objects() if isinstance(one, Relay)]
        if aborted:
            await cluster.client.abort_requests_async(["q"])
        await until(lambda: cluster.client.live == 0, "it has ended")
        await until(lambda: relay() is None, "it is gone")
    finally:
        gc.enable()


async def test_the_first_token_does_not_wait_for_the_handoff(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, silent=True))
    await cluster.send("q", PROMPT)
    await until(lambda: cluster.got["q"].tokens, "the first token is there")
    assert cluster.got["q"].tokens == answer(PROMPT, 1)
    assert not cluster.got["q"].over


async def test_shared_blocks_are_not_booked_twice(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    decode.shares = 5
    prompt = [1] * 10 * BLOCK_SIZE
    decode.faults.append(Fault(PHASE_DECODE, 2, silent=True))

    async def booked() -> list[int]:
        workers = (await cluster.scheduler.describe()).workers
        return [one.reserved_blocks for one in workers if one.identity.worker_id == "d0"]

    await cluster.send("q", prompt, 20)
    await until(lambda: len(cluster.got["q"].tokens) == 3, "it writes")
    whole = -(-(len(prompt) + 20 + 1) // BLOCK_SIZE)  # and the look-ahead
    deadline = time.monotonic() + 20 * PATIENCE
    while await booked() != [whole - 5]:
        assert time.monotonic() < deadline, await booked()
        await asyncio.sleep(0.01)
    await cluster.client.abort_requests_async(["q"])
    await cluster.settled()


async def test_a_mixed_worker_does_it_alone(cluster: Cluster) -> None:
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert [start.phase for start in mixed.seen.starts] == [PHASE_DECODE]


@pytest.mark.parametrize(("max_tokens", "eos_at", "reason"), [(1, None, "length"), (9, 0, "stop")])
async def test_a_request_that_ends_with_its_first_token_ends_there(
    cluster: Cluster, max_tokens: int, eos_at: int | None, reason: str
) -> None:
    """Where that is known before, the decode worker is not even asked."""
    prefill, decode = await cluster.pair()
    prefill.eos_at = eos_at
    got = await cluster.ask(PROMPT, max_tokens)
    assert (got.reason, got.tokens) == (reason, [EOS] if eos_at == 0 else answer(PROMPT, 1))
    await cluster.settled()
    asked = [start.request_id for start in decode.seen.starts]
    assert len(asked) == (max_tokens > 1)
    await until(lambda: decode.seen.aborts == asked, "it is told to wait no longer")
    assert decode.running == []
    await until(lambda: prefill.seen.aborts, "the KV that nobody wants is dropped")


async def test_a_stop_token_later_on(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    decode.eos_at = 4
    got = await cluster.ask(PROMPT, 30)
    assert (got.reason, got.tokens) == ("stop", [*answer(PROMPT, 4), EOS])


async def test_many_at_once(cluster: Cluster) -> None:
    await cluster.pair(prefill=2, decode=2)
    prompts = [[number, number + 1] for number in range(100)]
    answers = await asyncio.gather(*(cluster.ask(prompt, 20) for prompt in prompts))
    for prompt, got in zip(prompts, answers, strict=True):
        right(got, prompt, 20)
    await cluster.settled()


async def test_a_late_message_slows_the_router_for_a_moment(cluster: Cluster) -> None:
    """The front end gets fewer and larger outputs only while the router is behind."""
    _, decode = await cluster.pair()
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert cluster.pool.lag_s() < 0.4
    decode.late_s = 0.5
    await cluster.send("late", PROMPT)
    await until(lambda: cluster.pool.lag_s() > 0.4, "it is read late")
    right(await cluster.answer("late"), PROMPT, 8)
    await until(lambda: cluster.pool.lag_s() == 0, "nothing comes late any more", 1)


# -- the prefill side fails


@pytest.mark.parametrize(
    "fault",
    [
        Fault(PHASE_PREFILL, die=True),
        Fault(PHASE_PREFILL, failed=Failed.CODE_FULL),
        Fault(PHASE_PREFILL, failed=Failed.CODE_STAGING),
        Fault(PHASE_PREFILL, failed=Failed.CODE_DRAINING),
        Fault(PHASE_PREFILL, failed=Failed.CODE_STALE),
    ],
    ids=str,
)
async def test_another_worker_prefills(cluster: Cluster, fault: Fault) -> None:
    first, second, decode = await cluster.pair(prefill=2)
    first.faults = second.faults = deque([fault])
    started = time.monotonic()
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert time.monotonic() - started < 2 * PATIENCE
    chosen, other = sorted((first, second), key=lambda worker: worker.seen.starts[0].epoch)
    assert [start.epoch for start in chosen.seen.starts] == [1]
    assert [start.epoch for start in other.seen.starts] == [2]
    sources = {start.epoch: start.source for start in decode.seen.starts}
    assert sources[2].worker_id == other.worker_id
    failed = sources.get(1)  # the prefill may fail before the decode worker is connected
    assert failed is None or (failed.worker_id == chosen.worker_id and failed.key != sources[2].key)
    await cluster.settled()


async def test_where_the_staging_of_the_only_prefill_worker_stays_full_the_decode_worker_prefills(
    cluster: Cluster,
) -> None:
    """This happens while the staging of a 1P1D stays full (docs/decisions/0038)."""
    prefill, decode = await cluster.pair()
    prefill.faults.append(Fault(PHASE_PREFILL, failed=Failed.CODE_STAGING))
    right(await cluster.ask(LONG), LONG, 8)
    assert [start.epoch for start in prefill.seen.starts] == [1]
    tried = [(start.epoch, start.HasField("source")) for start in decode.seen.starts]
    # The refusal may have come before the router was connected to the decode worker.
    assert tried in ([(1, True), (2, False)], [(2, False)])
    assert cluster.count("retries_total", trouble="refused", worker="p0") == 1
    right(await cluster.ask(PROMPT), PROMPT, 8)  # the next request is asked of it again
    assert len(prefill.seen.starts) == 2
    await cluster.settled()


async def test_no_connection_to_the_prefill_worker(cluster: Cluster) -> None:
    first, second, _ = await cluster.pair(prefill=2)
    await first.die()
    for _ in range(6):  # whichever is chosen
        right(await cluster.ask(PROMPT), PROMPT, 8)
    assert len(second.seen.starts) == 6


@pytest.mark.parametrize("how", ["refuses", "is older"])
async def test_a_worker_that_does_not_fit_is_left_alone(
    cluster: Cluster, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = await cluster.pair(prefill=2, connect=False)
    if how == "refuses":
        why = first.refusal = "vLLM 0.31 here, 0.32 there"
    else:
        first.protocol -= 1
        why = f"it speaks protocol {first.protocol}"
    for _ in range(6):
        right(await cluster.ask(PROMPT), PROMPT, 8)
    assert first.seen.starts == []
    assert len(second.seen.starts) == 6
    assert why in caplog.text


# -- the handoff fails


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("not_kept", [True, False], ids=["not kept", "not loaded"])
async def test_a_handoff_fails(cluster: Cluster, prompt: list[int], not_kept: bool) -> None:
    """The decode worker prefills a short prompt, another prefill worker a long one; each token comes once."""
    first, second, decode = await cluster.pair(prefill=2)
    if not_kept:
        first.faults = second.faults = deque([Fault(PHASE_PREFILL, not_kept=True)])
    else:
        decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_HANDOFF))
    right(await cluster.ask(prompt), prompt, 8)
    last = decode.seen.starts[-1]
    epochs = [start.epoch for start in decode.seen.starts]
    assert epochs == sorted(set(epochs))  # a worker takes no epoch twice
    if prompt is PROMPT:
        assert not last.HasField("source")
        assert list(last.output_token_ids) == answer(prompt, 1)
        assert cluster.count("recomputed_prompts_total") == 1
    else:
        _, other = sorted((first, second), key=lambda worker: worker.seen.starts[0].epoch)
        assert last.source.worker_id == other.worker_id
        assert list(last.output_token_ids) == answer(prompt, 1)
        assert cluster.count("recomputed_prompts_total") == 0
    await cluster.settled()


async def test_without_another_prefill_worker_the_decode_worker_prefills(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_HANDOFF))
    right(await cluster.ask(LONG), LONG, 8)
    assert [start.HasField("source") for start in decode.seen.starts] == [True, False]
    await cluster.settled()


async def test_a_placement_that_is_kept_stays_booked(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pair was found for it, but somebody else was faster, time and again."""
    await cluster.pair(prefill=2)
    place = Placer.place

    def late(placer: Placer, need: Need) -> Assignment | NoChoice:
        if need.attempt.epoch > 1:
            return NoChoice(pb.Rejection.CODE_FULL, "all are full")
        return place(placer, need)

    async def booked() -> list[int]:
        return [one.reserved_requests for one in (await cluster.scheduler.describe()).workers]

    monkeypatch.setattr(Placer, "place", late)
    faults = deque([Fault(PHASE_DECODE, failed=Failed.CODE_HANDOFF), Fault(PHASE_DECODE, 2, silent=True)])
    for worker in cluster.members.workers.values():
        worker.faults = faults
    await cluster.send("q", LONG)
    await until(lambda: len(cluster.got["q"].tokens) > 1, "it decodes")
    deadline = time.monotonic() + 5 * PATIENCE
    while sum(await booked()) != 1:
        assert time.monotonic() < deadline, await booked()
        await asyncio.sleep(0.01)
    await cluster.client.abort_requests_async(["q"])
    await cluster.settled()


async def test_no_request_is_prefilled_for_a_worker_that_cannot_get_its_kv(cluster: Cluster) -> None:
    """The router reaches both; they do not reach each other."""
    prefill, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE))
    right(await cluster.ask(LONG), LONG, 8)
    for prompt in (PROMPT, LONG):
        right(await cluster.ask(prompt), prompt, 8)
    assert len(prefill.seen.starts) == 1
    assert cluster.count("retries_total", trouble="source", worker=prefill.worker_id) == 1
    await cluster.settled()


async def test_a_pair_that_is_avoided_is_no_failed_attempt(cluster: Cluster) -> None:
    """Its placement is changed before a worker hears of it, and its prefill worker has room for others."""
    prefill, decode = await cluster.pair()
    decode.faults += [
        Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE),
        *[Fault(PHASE_DECODE, 2, silent=True)] * 2,
    ]
    await cluster.send("fails", LONG)
    await until(lambda: len(cluster.got["fails"].tokens) > 1, "it decodes")
    recomputed = cluster.count("recomputed_prompts_total")
    await cluster.send("avoids", LONG)
    await until(lambda: len(cluster.got["avoids"].tokens) > 1, "it decodes")
    deadline = time.monotonic() + 5 * PATIENCE
    while any(
        one.reserved_prompt_tokens or one.reserved_requests
        for one in (await cluster.scheduler.describe()).workers
        if one.identity.worker_id == prefill.worker_id
    ):
        assert time.monotonic() < deadline, "the prefill worker stays booked"
        await asyncio.sleep(0.01)
    await cluster.client.abort_requests_async(["fails", "avoids"])
    await cluster.settled()
    [record] = [one for one in cluster.chronicle.recent.last() if one.response_id == "avoids"]
    assert (len(record.attempts), record.retried) == (1, False)
    assert cluster.count("pairs_avoided_total") == 1
    assert cluster.count("recomputed_prompts_total") == recomputed
    assert cluster.count("live_requests") == 0


async def test_a_request_that_leaves_while_a_pair_is_avoided_is_counted_out_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, decode = await cluster.pair(prefill=2)
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE))
    right(await cluster.ask(LONG), LONG, 8)
    monkeypatch.setattr(placement.Pairs, "avoid", lambda *_: True)
    asked = 0
    place = cluster.scheduler.place

    async def hangs(need: Need) -> Placement:
        nonlocal asked
        asked += 1
        if asked == 2:
            await asyncio.sleep(60)
        return await place(need)

    monkeypatch.setattr(cluster.scheduler, "place", hangs)
    await cluster.send("leaves", LONG)
    await until(lambda: asked == 2, "another pair is asked for")
    await cluster.client.abort_requests_async(["leaves"])
    await cluster.settled()
    assert cluster.count("live_requests") == 0


async def test_lines_of_a_stream_are_not_of_the_request_that_opened_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream does not keep what the context variables of that request hold, either."""
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    seen: list[Any] = []
    ended = cluster.pool._ended

    def noted(*args: Any) -> None:
        seen.append(contextvars.copy_context().get(logs._concerns))
        ended(*args)

    cluster.pool._ended = noted  # type: ignore[method-assign]
    logs.concern(request_id="opens")
    right(await cluster.ask(PROMPT), PROMPT, 8)
    await mixed.die()
    await until(lambda: seen, "the stream has ended")
    assert seen == [None]


async def test_another_pair_is_used_until_one_is_joined_again(cluster: Cluster) -> None:
    now = 0.0
    cluster.remake(pairs_clock=lambda: now)
    first, second, decode = await cluster.pair(prefill=2)
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_SOURCE))
    right(await cluster.ask(LONG), LONG, 8)
    cut, other = (first, second) if first.seen.starts[0].epoch == 1 else (second, first)
    for number in range(4):
        right(await cluster.ask([number, *LONG]), [number, *LONG], 8)
    assert (len(cut.seen.starts), len(other.seen.starts)) == (1, 5)
    now = placement.CUT_S
    for number in range(8):
        right(await cluster.ask([number, 1, *LONG]), [number, 1, *LONG], 8)
    assert len(cut.seen.starts) > 1
    await cluster.settled()


async def test_the_last_attempt_computes_on_the_spot(cluster: Cluster) -> None:
    cluster.remake(max_attempts=1)
    *_, decode = await cluster.pair(prefill=2)
    decode.faults.append(Fault(PHASE_DECODE, failed=Failed.CODE_HANDOFF))
    right(await cluster.ask(LONG), LONG, 8)
    assert len(decode.seen.starts) == 2


# -- the decode side fails


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("how", ["die", "drain"])
async def test_another_goes_on_with_the_answer(cluster: Cluster, after: int, how: str) -> None:
    *_, first, second = await cluster.pair(decode=2, step_s=0.002)
    fault = {
        "die": Fault(PHASE_DECODE, after, die=True),
        "drain": Fault(PHASE_DECODE, after, failed=Failed.CODE_DRAINING),
    }[how]
    first.faults = second.faults = deque([fault])
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    _, other = sorted((first, second), key=lambda worker: worker.seen.starts[0].epoch)
    [start] = other.seen.starts
    assert start.epoch == 2
    so_far = list(start.output_token_ids)
    assert so_far == answer(PROMPT, len(so_far))
    # The new prefill makes one more. And a worker that refuses does so before the prefill's first token.
    assert len(so_far) == after + 1 or (how, after) == ("drain", 0)
    await cluster.settled()


@pytest.mark.parametrize(
    ("limits", "status", "because"),
    [
        ({"request_timeout_s": 0.7}, 504, "longer than 0.7 s"),
        ({"replace_wait_s": 0.7}, 503, "no worker can take over within 0.7 s (router.replace_wait_s)"),
    ],
    ids=["its own deadline", "the wait for a worker"],
)
async def test_no_other_worker_can_decode(
    cluster: Cluster, limits: dict[str, float], status: int, because: str
) -> None:
    """The request waits for as long as it may, and then ends with what happened."""
    cluster.remake(**limits)  # type: ignore[arg-type]
    for one in await cluster.pair():
        one.faults.append(Fault(PHASE_DECODE, 3, die=True))
    got = await cluster.ask(PROMPT, 20)
    assert got.tokens == answer(PROMPT, 7)  # the prefill's one, three by each decode worker
    assert isinstance(got.error, RefusedByRouter)
    assert got.error.http_status == status
    assert because in str(got.error)
    assert re.search("worker [pd]0", str(got.error))
    await cluster.settled()


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT * 40], ids=["short", "long"])
async def test_a_prefill_worker_that_hangs_during_the_pull_is_given_up(
    cluster: Cluster, prompt: list[int]
) -> None:
    """The pull has a deadline of its own, much longer than it takes to notice that the source is lost."""
    cluster.remake(silence_s=0.5)
    *prefills, decode = await cluster.pair(prefill=2)
    decode.faults.append(Fault(PHASE_DECODE, silent=True))  # it waits for the KV
    asking = asyncio.create_task(cluster.ask(prompt, 20))
    await until(lambda: "q0" in cluster.got and cluster.got["q0"].tokens, "the pull has begun")
    [source] = [one for one in prefills if one.seen.starts]
    source.hangs = True
    right(await asking, prompt, 20)
    assert decode.seen.aborts == [decode.seen.starts[0].request_id]
    assert [start.epoch for start in decode.seen.starts] == [1, 2]
    assert cluster.count("retries_total", trouble="handoff", worker=source.worker_id) == 1
    await cluster.settled()


async def test_a_token_of_an_attempt_that_was_given_up_is_not_the_next_one_s(cluster: Cluster) -> None:
    """The token is on its way when the next attempt is started on the same worker."""
    cluster.remake(silence_s=0.5)
    prefill, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, silent=True, crosses=True))
    asking = asyncio.create_task(cluster.ask(PROMPT, 20))
    await until(lambda: "q0" in cluster.got and cluster.got["q0"].tokens, "the pull has begun")
    prefill.hangs = True
    right(await asking, PROMPT, 20)
    assert [start.epoch for start in decode.seen.starts] == [1, 2]
    await cluster.settled()


async def test_kv_that_waits_to_be_pulled_keeps_its_stream_open(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker frees what it saved for a router whose stream has ended."""
    monkeypatch.setattr(stream, "IDLE_CLOSE_S", 0.05)
    prefill, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, silent=True))  # it waits for a slot
    asking = asyncio.create_task(cluster.ask(PROMPT, 20))
    await until(lambda: decode.seen.starts, "the decode worker is told")
    idle = await cluster.members.add(FakeWorker("idle", pb.ROLE_DECODE))
    await cluster.connect(idle)
    await until(lambda: cluster.pool.opened(idle.worker_id) is None, "one that nobody needs is closed")
    assert cluster.pool.opened(prefill.worker_id) is not None
    decode.go_on()
    right(await asking, PROMPT, 20)
    await until(lambda: cluster.pool.opened(prefill.worker_id) is None, "it is closed")
    await cluster.settled()


async def test_a_prefill_worker_goes_on_for_the_last_decode_worker(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, 3, die=True))
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    assert [list(start.output_token_ids) for start in prefill.seen.starts] == [[], answer(PROMPT, 4)]
    await cluster.settled()


def with_weights(fingerprint: str, name: str) -> FakeWorker:
    worker = FakeWorker(name, pb.ROLE_MIXED)
    worker.model_fingerprint = fingerprint
    return worker


async def test_an_answer_goes_on_with_the_weights_that_began_it(cluster: Cluster) -> None:
    """Before the first token any weights will do."""
    old = await cluster.members.add(with_weights("f1", "old"))
    old.faults.append(Fault(PHASE_DECODE, 5, die=True))
    asking = asyncio.create_task(cluster.ask(PROMPT, 20))
    await until(lambda: old.seen.starts, "the old one has begun")
    new = [await cluster.members.add(with_weights("f2", f"new{number}")) for number in range(2)]
    await until(lambda: cluster.count("retries_total", trouble="lost", worker="old") == 1, "it was lost")
    other = await cluster.members.add(with_weights("f1", "other"))
    right(await asking, PROMPT, 20)
    assert [list(start.output_token_ids) for start in other.seen.starts] == [answer(PROMPT, 5)]
    assert not any(worker.seen.starts for worker in new)
    await cluster.members.leave(other)
    new[0].faults = new[1].faults = deque([Fault(PHASE_DECODE, 0, die=True)])
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    assert all(worker.seen.starts for worker in new)
    await cluster.settled()


async def test_workers_of_another_vllm_are_not_asked(cluster: Cluster) -> None:
    """Neither the scheduler nor the router itself places on them: their requests are other bytes."""
    theirs, ours = FakeWorker("theirs", pb.ROLE_MIXED), FakeWorker("ours", pb.ROLE_MIXED)
    theirs.vllm_version = "0.1.0"
    theirs.refusal = "another vLLM"
    for worker in (theirs, ours):
        await cluster.members.add(worker)
    for _ in range(6):
        right(await cluster.ask(PROMPT), PROMPT, 8)
    assert not theirs.seen.starts
    assert cluster.count("retries_total", trouble="unreachable", worker="theirs") == 0
    await cluster.scheduler.refresh()
    router = cluster.scheduler.router_id
    needs = (need(f"a{number}", 1, 3, 1, router_id=router, vllm_version=VLLM_VERSION) for number in range(6))
    alone = [cluster.scheduler.place_alone(one) for one in needs]
    assert {placement.decode.worker_id for placement in alone} == {"ours"}


async def test_an_answer_that_has_begun_waits_for_a_worker_that_comes_back(cluster: Cluster) -> None:
    for one in await cluster.pair():
        one.faults.append(Fault(PHASE_DECODE, 3, die=True))
    asking = asyncio.create_task(cluster.ask(PROMPT, 20))
    await until(lambda: cluster.count("rejections_total", code="NO_WORKERS"), "nobody is there")
    assert not cluster.got["q0"].over
    again = await cluster.members.add(FakeWorker("d0-again", pb.ROLE_DECODE))
    right(await asking, PROMPT, 20)
    assert len(again.seen.starts) == 1


async def test_a_request_without_a_token_waits_too(cluster: Cluster) -> None:
    """It was admitted, so its client should not notice that a worker died."""
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    mixed.faults.append(Fault(PHASE_DECODE, die=True))
    asking = asyncio.create_task(cluster.ask(PROMPT))
    await until(lambda: cluster.count("rejections_total", code="NO_WORKERS"), "nobody is there")
    await cluster.members.add(FakeWorker("m0-again", pb.ROLE_MIXED))
    right(await asking, PROMPT, 8)


async def test_the_only_worker_there_is_asked_again(cluster: Cluster) -> None:
    """Its stream broke, but the scheduler still gets its heartbeats, and there is no other worker."""
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    mixed.faults.append(Fault(PHASE_DECODE, 3, failed=Failed.CODE_STALE))
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    assert [list(start.output_token_ids) for start in mixed.seen.starts] == [[], answer(PROMPT, 3)]
    await cluster.settled()


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        (Failed.CODE_FULL, "full"),
        (Failed.CODE_STAGING, "refused"),
        (Failed.CODE_DRAINING, "refused"),
    ],
)
async def test_closed_doors_use_up_no_attempt(cluster: Cluster, code: Failed.Code, trouble: str) -> None:
    cluster.remake(max_attempts=1)
    mixed = await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    mixed.faults += [Fault(PHASE_DECODE, failed=code) for _ in range(2)]
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert len(mixed.seen.starts) == 3
    assert cluster.count("retries_total", trouble=trouble, worker="m0") == 2


@pytest.mark.parametrize(("phase", "after"), [(PHASE_PREFILL, 0), (PHASE_DECODE, 0), (PHASE_DECODE, 4)])
async def test_a_worker_that_hangs_is_as_dead_as_a_killed_one(
    cluster: Cluster, phase: Phase, after: int
) -> None:
    """Its connections stand and its lease may still run, so only the silence on its stream reveals it."""
    cluster.remake(silence_s=0.4)
    workers = await cluster.pair(prefill=2, decode=2)
    shared = deque([Fault(phase, after, hang=True)])
    for worker in workers:
        worker.faults = shared
    began = time.monotonic()
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    assert time.monotonic() - began < 2 * PATIENCE
    [hung] = [worker for worker in workers if worker.hangs]
    assert cluster.count("retries_total", trouble="lost", worker=hung.worker_id) == 1
    right(await cluster.ask(PROMPT), PROMPT, 8)  # and left alone from now on
    assert len(hung.seen.starts) == 1


async def test_a_worker_cut_off_from_the_router_alone_costs_no_later_request_its_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler still gets its heartbeats, and places on it."""
    monkeypatch.setattr(pool, "SUSPECT_S", 0.5)
    monkeypatch.setattr(stream, "CALL_TIMEOUT_S", 1.5)
    cluster.remake(silence_s=1.0)
    _, first, second = await cluster.pair(decode=2)
    first.faults = second.faults = deque([Fault(PHASE_DECODE, 3, hang=True)])
    right(await cluster.ask(PROMPT, 20), PROMPT, 20)
    cut = first if first.hangs else second
    longest, end = 0.0, time.monotonic() + 2.5  # it is tried again within 2 s
    while time.monotonic() < end:
        began = time.monotonic()
        right(await cluster.ask(PROMPT), PROMPT, 8)
        longest = max(longest, time.monotonic() - began)
        await asyncio.sleep(0.01)
    assert longest < 1.0
    assert len(cut.seen.starts) == 1
    cut.hangs = False
    await until(lambda: not cluster.pool.suspects(), "it is reached again")


async def test_workers_that_only_the_scheduler_lost_still_serve() -> None:
    async with Cluster(worker_lease_s=2.0) as cluster:
        prefill, decode = await cluster.pair()
        right(await cluster.ask(PROMPT), PROMPT, 8)
        await cluster.scheduler.refresh()
        for worker in (prefill, decode):
            await cluster.members.lose(worker)
        deadline = time.monotonic() + 10 * PATIENCE
        while (await cluster.scheduler.describe()).workers:
            assert time.monotonic() < deadline, "the scheduler still knows workers"
            await asyncio.sleep(0.1)
        await cluster.scheduler.refresh(reached=cluster.pool.reached())
        right(await cluster.ask(PROMPT), PROMPT, 8)
        assert len(prefill.seen.starts) == len(decode.seen.starts) == 2
        await cluster.members.leave(prefill)
        await cluster.settled()


async def test_a_router_that_was_away_does_not_blame_its_workers(cluster: Cluster) -> None:
    cluster.remake(silence_s=0.3)
    _, decode = await cluster.pair(step_s=0.01)
    await cluster.send("q", PROMPT, 60)
    await until(lambda: len(cluster.got["q"].tokens) > 3, "it writes")
    time.sleep(1.0)  # noqa: ASYNC251 (as a stopped process would)
    right(await cluster.answer("q"), PROMPT, 60)
    assert len(decode.seen.starts) == 1


async def test_an_idle_worker_stays_connected(cluster: Cluster) -> None:
    cluster.remake(silence_s=0.2)
    prefill, decode = await cluster.pair()
    right(await cluster.ask(PROMPT), PROMPT, 8)
    streams = dict(cluster.pool._streams)
    await asyncio.sleep(0.6)
    assert cluster.pool._streams == streams
    assert not cluster.pool.suspects()
    del prefill, decode


async def test_a_full_journal_refuses_early(cluster: Cluster) -> None:
    cluster.remake(journal=7000)
    prefill, decode = await cluster.pair(step_s=0.01)
    await cluster.send("first", PROMPT, 50)
    with pytest.raises(RefusedByRouter, match="journal_mib") as full:
        await cluster.send("second", PROMPT, 50)
    assert full.value.http_status == 503
    right(await cluster.answer("first"), PROMPT, 50)
    await cluster.settled()
    right(await cluster.ask(PROMPT, 50), PROMPT, 50)
    with pytest.raises(RefusedByRouter) as never:
        await cluster.send("large", PROMPT, 50, prompt_logprobs=5)
    assert never.value.http_status == 400
    assert len(prefill.seen.starts) == len(decode.seen.starts) == 2


async def test_a_request_that_is_not_placed_leaves_the_journal(cluster: Cluster) -> None:
    assert refused(await cluster.ask(PROMPT), "worker") == 503
    await cluster.settled()
    assert (len(cluster.journal), cluster.journal.size) == (0, 0)


async def test_usage_is_of_all_attempts(cluster: Cluster) -> None:
    *_, first, second = await cluster.pair(decode=2, step_s=0.002)
    first.faults = second.faults = deque([Fault(PHASE_DECODE, 5, failed=Failed.CODE_STALE)])
    for worker in (first, second):
        worker.speculative_method = "mtp"
        worker.drafts = RequestSpecDecodeMetrics(num_spec_tokens=2, histogram=[4, 3, 2], num_draft_tokens=18)
    await cluster.send("q", PROMPT, 20)
    state = cluster.client._relays["q"].state
    right(await cluster.answer("q"), PROMPT, 20)
    used = usage_of([state])
    assert (used["draft_steps"], used["drafted_tokens"], used["accepted_tokens"]) == (18, 36, 14)
    assert used["acceptance_by_position"] == [round(10 / 18, 4), round(4 / 18, 4)]
    assert sorted(used["decode_worker"].split(", ")) == ["d0", "d1"]
    assert used["attempts"] == 2
    assert used["decode_ms"] > 30  # 20 steps of 2 ms, of both


async def test_attempts_run_out(cluster: Cluster) -> None:
    cluster.remake(max_attempts=2)
    workers = await cluster.pair(prefill=1, decode=3)
    for worker in workers[1:]:
        worker.faults.append(Fault(PHASE_DECODE, 0, failed=Failed.CODE_STALE))
    got = await cluster.ask(PROMPT, 20)
    assert "2 workers of at most 2 failed under the request" in str(got.error)
    assert got.tokens == answer(PROMPT, len(got.tokens))
    await cluster.settled()


async def test_an_answer_that_gets_on_outlives_more_workers(cluster: Cluster) -> None:
    cluster.remake(max_attempts=2)
    faults = deque(Fault(PHASE_DECODE, 2, failed=Failed.CODE_STALE) for _ in range(5))
    for worker in await cluster.pair(decode=2):
        worker.faults = faults
    right(await cluster.ask(PROMPT, 200), PROMPT, 200)
    assert not faults


async def test_a_request_that_a_worker_cannot_parse_is_not_retried(cluster: Cluster) -> None:
    first, second, _ = await cluster.pair(prefill=2)
    for worker in (first, second):
        worker.faults.append(Fault(PHASE_PREFILL, failed=Failed.CODE_INVALID))
    got = await cluster.ask(PROMPT)
    assert isinstance(got.error, RefusedByRouter)
    assert "the test wants it" in str(got.error)
    assert got.error.http_status == 400  # and it is not retried
    assert len(first.seen.starts) + len(second.seen.starts) == 1


async def test_a_complete_answer_is_not_admitted_again(cluster: Cluster) -> None:
    """The worker dies after it sent the last token, before it could say that it was the last."""
    *_, first, second = await cluster.pair(decode=2)
    for worker in (first, second):
        worker.faults.append(Fault(PHASE_DECODE, 7, die=True))
    await cluster.send("q", PROMPT, 30)
    cluster.client._relays["q"].state.max_tokens = 8  # the fakes go by the request and would generate 30
    got = await cluster.answer("q")
    right(got, PROMPT, 8)
    assert len(first.seen.starts) + len(second.seen.starts) == 1
    await cluster.settled()


# -- ends from outside


async def test_abort_reaches_both_workers(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair(step_s=0.01)
    await cluster.send("q", PROMPT, 1000)
    await until(lambda: len(cluster.got["q"].tokens) > 3, "it writes")
    await cluster.client.abort_requests_async(["q"])
    await until(lambda: prefill.seen.aborts == decode.seen.aborts == ["q"], "both are told", 1.0)
    assert decode.running == []
    await cluster.settled()
    assert (await cluster.scheduler.describe()).handoffs[0].outcome == "abort"


async def test_abort_right_away(cluster: Cluster) -> None:
    """The request is aborted before its task has run at all."""
    await cluster.pair()
    await cluster.send("q", PROMPT, 1000)
    await cluster.client.abort_requests_async(["q"])
    await cluster.settled()


async def test_an_abort_while_it_is_placed_books_nothing(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.send("q", PROMPT)
    await asyncio.sleep(0)  # its task waits for a placement
    await cluster.client.abort_requests_async(["q"])
    await cluster.settled()


async def test_a_request_that_takes_too_long(cluster: Cluster) -> None:
    cluster.remake(max_attempts=3, request_timeout_s=0.2)
    prefill, decode = await cluster.pair()
    decode.faults.append(Fault(PHASE_DECODE, 2, silent=True))
    got = await cluster.ask(PROMPT, 50)
    assert isinstance(got.error, RefusedByRouter)
    assert got.error.http_status == 504
    await until(lambda: prefill.seen.aborts and decode.seen.aborts, "both are told")
    await cluster.settled()


async def test_late_outputs_of_an_aborted_request_are_dropped(cluster: Cluster) -> None:
    _, decode = await cluster.pair()
    decode.before_step = lambda: cluster.client.abort(["q"])  # the step's tokens are already on their way
    await cluster.send("q", PROMPT, 1000)
    await cluster.settled()
    seen = len(cluster.got["q"].tokens)
    right(await cluster.ask([9], 5), [9], 5)
    assert len(cluster.got["q"].tokens) == seen <= 1


# -- no placement


async def test_no_workers(cluster: Cluster) -> None:
    assert refused(await cluster.ask(PROMPT), "worker") == 503
    assert cluster.count("rejections_total", code="NO_WORKERS") == 1


async def test_too_large_for_any_worker(cluster: Cluster) -> None:
    await cluster.pair()
    assert refused(await cluster.ask([1] * 5000), "longer than the model's limit") == 400


async def test_scheduler_away(cluster: Cluster) -> None:
    await cluster.pair()
    await cluster.server.__aexit__(None, None, None)
    assert refused(await cluster.ask(PROMPT), "scheduler") == 503


async def test_the_policy_sees_the_prompt_s_prefixes_with_and_without_a_scheduler(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: list[Need] = []
    choose = Policy.choose

    def recorded(policy: Policy, view: Any, asked: Need) -> Any:
        needs.append(asked)
        return choose(policy, view, asked)

    monkeypatch.setattr(Policy, "choose", recorded)
    await cluster.members.add(FakeWorker("m0", pb.ROLE_MIXED))
    prompt = list(range(2 * BLOCK_SIZE))
    right(await cluster.ask(prompt), prompt, 8)
    await cluster.scheduler.refresh()
    await cluster.server.__aexit__(None, None, None)
    right(await cluster.ask(prompt), prompt, 8)
    asked = {(one.attempt.request_id, one.prefix.tokens, len(one.prefix.keys)) for one in needs}
    assert asked == {("q0", BLOCK_SIZE, 2), ("q1", BLOCK_SIZE, 2)}
    assert len({one.prefix.keys for one in needs}) == 1


# -- a full house


async def test_requests_without_room_wait(cluster: Cluster) -> None:
    await cluster.pair(step_s=0.001, max_num_seqs=2)
    prompts = [[number] for number in range(40)]
    for number, prompt in enumerate(prompts):
        await cluster.send(f"r{number}", prompt)  # does not wait for a placement
    await until(lambda: len(cluster.waiting) > 20, "most of them wait")
    assert cluster.count("waiting_requests") == len(cluster.waiting)
    for number, prompt in enumerate(prompts):
        right(await cluster.answer(f"r{number}"), prompt, 8)
    assert cluster.count("wait_seconds_count") > 20
    await cluster.settled()
    assert len(cluster.waiting) == 0


async def test_a_client_may_send_again_right_after_its_last_token(cluster: Cluster) -> None:
    """There are as many clients as slots: a slot must be free before its last token reaches the client."""
    cluster.remake(max_waiting=1)
    _, decode = await cluster.pair(max_num_seqs=1)
    del decode
    for number in range(50):
        right(await cluster.ask([number], 3), [number], 3)
    await cluster.settled()


async def test_the_upload_of_a_request_gives_it_no_earlier_turn(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.pair()
    place = cluster.scheduler.place
    waited: list[float] = []

    async def noted(asked: Need) -> Placement:
        waited.append(asked.waited_s)
        return await place(asked)

    monkeypatch.setattr(cluster.scheduler, "place", noted)
    now = time.monotonic()
    current_admission.set(Admission(http=HttpTimes(arrived=now - 30, received=now)))
    right(await cluster.ask(PROMPT), PROMPT, 8)
    assert waited[0] < 10


async def test_a_full_queue_refuses_and_names_its_bound(cluster: Cluster) -> None:
    cluster.remake(max_waiting=1)
    _, decode = await cluster.pair(max_num_seqs=1)
    decode.faults += [Fault(PHASE_DECODE, silent=True)] * 9
    await fill(cluster)
    assert refused(await cluster.ask(PROMPT), r"1 wait already \(router.max_waiting\)") == 503
    assert cluster.count("rejections_total", code="QUEUE") == 1
    with pytest.raises(RefusedByRouter, match="max_waiting"):
        cluster.client.check_room()  # before another is rendered
    assert cluster.count("rejections_total", code="QUEUE") == 2
    assert cluster.count("requests_total", outcome="refused") == 2


async def test_waiting_has_an_end(cluster: Cluster) -> None:
    cluster.remake(max_wait_s=0.3)
    _, decode = await cluster.pair(max_num_seqs=1)
    decode.faults += [Fault(PHASE_DECODE, silent=True)] * 9
    await fill(cluster)
    because = r"within 0.3 s \(router.max_wait_s\).*d0: \d of \d requests: engine.max_num_seqs"
    assert refused(await cluster.ask(PROMPT), because) == 503


async def test_the_client_s_own_deadline_ends_the_wait(cluster: Cluster) -> None:
    _, decode = await cluster.pair(max_num_seqs=1)
    decode.faults += [Fault(PHASE_DECODE, silent=True)] * 9
    await fill(cluster)
    cluster.client.limits = replace(cluster.client.limits, request_timeout_s=0.4)
    assert refused(await cluster.ask(PROMPT), "waiting for room") == 504


async def test_an_abort_while_it_waits_lets_the_next_one_in(cluster: Cluster) -> None:
    _, decode = await cluster.pair(step_s=0.001, max_num_seqs=1)
    decode.faults += [Fault(PHASE_DECODE, silent=True)] * 9
    held = await fill(cluster)
    await cluster.send("next", PROMPT)
    await cluster.client.abort_requests_async([held[-1]])  # whose turn it is
    decode.faults.clear()
    await cluster.client.abort_requests_async(held[:-1])
    right(await cluster.answer("next"), PROMPT, 8)
    await cluster.settled()


async def test_a_scheduler_that_dies_loses_no_waiting_request(cluster: Cluster) -> None:
    _, decode = await cluster.pair(step_s=0.001, max_num_seqs=1)
    decode.faults.append(Fault(PHASE_DECODE, silent=True))
    while len(cluster.scheduler.standby.workers) < 2:
        await cluster.scheduler.refresh()  # as a router does every second
    held = await fill(cluster)
    await cluster.server.__aexit__(None, None, None)
    decode.faults.clear()
    await cluster.client.abort_requests_async(held[:-1])
    right(await cluster.answer(held[-1]), [0], 8)


async def test_the_first_token_waits_for_a_slot(cluster: Cluster) -> None:
    """A stream must not stand still after its first token because the decode worker's batch is full.

    A loaded KV cache is no slot: an engine loads those of requests that wait.
    """
    _, decode = await cluster.pair(max_num_seqs=4)
    decode.faults += [Fault(PHASE_DECODE, silent=True, loaded=True)] * 5
    for number in range(4):
        await cluster.send(f"r{number}", [number], 20)
        await until(lambda number=number: cluster.got[f"r{number}"].tokens, "there is a slot for it")
    await cluster.send("last", [9], 20)
    loaded = {"worker": "d0", "transport": "shm"}
    await until(lambda: cluster.count("handoff_seconds_count", **loaded) == 5, "its KV cache is loaded")
    assert cluster.got["last"].tokens == []
    assert cluster.count("time_to_first_token_seconds_count") == 4
    decode.go_on()
    right(await cluster.answer("last"), [9], 20)
    assert cluster.count("time_to_first_token_seconds_count") == 5


async def test_a_request_that_lost_its_worker_goes_before_those_that_wait(cluster: Cluster) -> None:
    """All slots are taken, and its client sees a stream that stands still."""
    _, dies, full = await cluster.pair(decode=2, step_s=0.001, max_num_seqs=1)
    for worker in (dies, full):
        worker.faults += [Fault(PHASE_DECODE, silent=True, after_tokens=2)] * 2
    held = await fill(cluster)
    await until(lambda: all(len(cluster.got[one].tokens) == 3 for one in held[:-1]), "the others decode")
    await cluster.send("newcomer", PROMPT)
    await until(lambda: len(cluster.waiting) == 2, "two wait")
    lost = {start.request_id for start in dies.seen.starts}
    stays = [start.request_id for start in full.seen.starts]
    for worker in (dies, full):
        worker.faults.clear()
    await dies.die()
    await until(lambda: len(cluster.waiting) == 2 + len(lost), "it waits, too")
    await cluster.client.abort_requests_async(stays)
    for name in (*lost, held[-1]):
        right(await cluster.answer(name), [0], 8)
    right(await cluster.answer("newcomer"), PROMPT, 8)
    after = [start.request_id for start in full.seen.starts[len(stays) :]]
    assert set(after[: len(lost)]) == lost
    await cluster.settled()


async def test_a_worker_that_failed_a_request_is_asked_again_where_the_others_are_full(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that come after it wait for it, also while only that worker has room."""
    monkeypatch.setattr(relay, "EXCLUDED_S", 0.2)
    _, fails, full = await cluster.pair(decode=2, step_s=0.001, max_num_seqs=1)
    for worker in (fails, full):
        worker.faults += [Fault(PHASE_DECODE, silent=True, after_tokens=2)] * 2
    held = await fill(cluster)
    await until(lambda: all(len(cluster.got[one].tokens) == 3 for one in held[:-1]), "the others decode")
    lost = {start.request_id for start in fails.seen.starts}
    fails.faults.clear()
    fails.go_on(Fault(PHASE_DECODE, failed=Failed.CODE_STALE))
    for name in (*lost, held[-1]):
        right(await cluster.answer(name), [0], 8)
    assert {start.request_id for start in fails.seen.starts[len(lost) :]} == {*lost, held[-1]}
    await cluster.client.abort_requests_async([one for one in held[:-1] if one not in lost])
    await cluster.settled()


async def fill(cluster: Cluster) -> list[str]:
    """Send requests until one waits; return their ids."""
    sent: list[str] = []
    while len(cluster.waiting) == 0:
        sent.append(f"full{len(sent)}")
        await cluster.send(sent[-1], [0])
        state = cluster.client._relays[sent[-1]].state
        await until(lambda state=state: state.attempts or len(cluster.waiting), "it is placed or waits")
    return sent


# -- reserved arguments and ids


async def test_reserved_arguments_are_stripped(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    mine = {"kv_transfer_params": {"do_remote_prefill": True}, "baton_generated": 3, "ec_transfer_params": {}}
    await cluster.ask(PROMPT, extra_args={**mine, "session_id": "s"})
    await cluster.ask(PROMPT, extra_args=mine)
    assert prefill.seen.extra_args == [{"session_id": "s"}, None]


async def test_a_client_s_strange_id_does_not_travel(cluster: Cluster) -> None:
    prefill, _ = await cluster.pair()
    name = "{x}:*\n" + "a" * 500
    await cluster.send(name, PROMPT)
    right(await cluster.answer(name), PROMPT, 8)
    travelled = prefill.seen.starts[0].request_id
    assert travelled.isascii()
    assert len(travelled) < 64
