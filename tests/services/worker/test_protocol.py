"""The worker's stream: epochs, aborts, refusals, a router that goes away."""

from __future__ import annotations

import contextlib

from baton.handoff import transports
from baton.protos import worker_pb2 as pb
from harness.support import eventually
from harness.workers import Fleet, Worker
from tests.services.worker.router import (
    DECODE,
    PREFILL,
    Got,
    PoolingParams,
    connected,
    hello,
    prompt,
    request,
)

LONG = {"max_tokens": 3900}  # it still runs when a test on a busy machine hears of its beginning
RUNNING = "baton_worker_requests_running"


def refused(got: Got, code: int) -> str:
    assert got.failed is not None
    assert got.failed.code == code
    assert (got.tokens, got.finish, got.saved) == ([], None, None)
    return got.failed.message


async def test_hello_tells_who_it_is(mixed: Worker) -> None:
    reply = await hello(mixed.address)
    assert reply.refusal == ""
    identity = reply.identity
    assert (identity.worker_id, identity.address, identity.model) == (mixed.name, mixed.address, "tiny")
    assert identity.capacity.block_size == 32
    assert identity.capacity.num_blocks == 4096
    assert list(identity.capacity.transports) == transports.usable(None)
    assert identity.capacity.lookahead_tokens == 1
    assert len(identity.capacity.compatibility_hash) >= 32


async def test_hello_refuses_what_does_not_fit_and_names_both_sides(mixed: Worker) -> None:
    other_model = (await hello(mixed.address, model="other")).refusal
    assert "'other'" in other_model
    assert "'tiny'" in other_model
    older = (await hello(mixed.address, protocol=0)).refusal
    assert "speaks protocol 0" in older
    assert "run the same version of Baton" in older
    other_vllm = (await hello(mixed.address, vllm_version="0.9.1")).refusal
    assert "0.9.1" in other_vllm
    assert "0.32.0" in other_vllm


async def test_an_attempt_with_a_known_epoch_is_stale(mixed: Worker) -> None:
    before = mixed.figure("baton_worker_requests_refused_total")
    async with connected(mixed.address) as stream:
        assert (
            await stream.run(request("again", prompt(20), max_tokens=2), DECODE, epoch=2)
        ).finish is not None
        for epoch in (1, 2):
            got = await stream.run(request("again", prompt(20), max_tokens=2), DECODE, epoch=epoch)
            assert "epoch 2" in refused(got, pb.Failed.CODE_STALE)
        assert mixed.figure("baton_worker_requests_refused_total") == before + 2
        assert (
            await stream.run(request("again", prompt(20), max_tokens=2), DECODE, epoch=3)
        ).finish is not None


async def test_a_later_epoch_ends_the_earlier_one(mixed: Worker) -> None:
    """On the same worker, while the first attempt runs: only the second one's tokens leave."""
    tokens = prompt(30, seed=3)
    async with connected(mixed.address) as stream:
        whole = await stream.run(request("whole epoch", tokens, max_tokens=60), DECODE)
        await stream.start(request("twice", tokens, **LONG), DECODE, epoch=1)
        begun = await stream.some("twice", 5)
        seen = list(begun.tokens)
        got = await stream.run(request("twice", tokens, max_tokens=60), DECODE, epoch=2, written=seen)
        assert seen + got.tokens[-(60 - len(seen)) :] == whole.tokens
        assert len(got.tokens) < LONG["max_tokens"] / 2  # and what was under way of the first, no more
    eventually(lambda: mixed.figure(RUNNING) == 0, 10, "the first attempt ends")


async def test_abort_ends_a_request_at_once(mixed: Worker) -> None:
    async with connected(mixed.address) as stream:
        await stream.start(request("aborted", prompt(20), **LONG), DECODE)
        await stream.some("aborted", 3)
        await stream.abort("aborted", "never heard of")
        eventually(lambda: mixed.figure(RUNNING) == 0, 10, "it stops running")
        beside = await stream.run(request("beside", prompt(20), max_tokens=3), DECODE)
        assert len(beside.tokens) == 3


async def test_blocks_that_two_answers_hold_are_told(mixed: Worker) -> None:
    """The blocks of a common beginning need no room twice, while the first request runs."""
    tokens = prompt(100, seed=77)
    async with connected(mixed.address) as stream:
        await stream.start(request("held first", tokens, **LONG), DECODE)
        assert (await stream.some("held first", 2)).shared == 0
        await stream.start(request("held too", [*tokens, 9, 9, 9], **LONG), DECODE)
        assert (await stream.some("held too", 2)).shared == 3  # of 32 tokens
        await stream.abort("held first", "held too")
        eventually(lambda: mixed.figure(RUNNING) == 0, 10, "they end")
        alone = await stream.run(request("cached alone", tokens, max_tokens=4), DECODE)
        assert alone.shared == 0  # cached, and held by nobody else: it takes that room itself


async def test_the_end_of_a_stream_ends_its_requests_and_frees_its_handoffs(
    prefill: Worker, mixed: Worker
) -> None:
    async with connected(prefill.address) as source, connected(mixed.address) as target:
        got = await source.run(request("kept", prompt(100, seed=4)), PREFILL)
        assert got.saved is not None
        eventually(lambda: prefill.figure("baton_worker_handoffs_pinned") == 1, 10, "it is pinned")
        await target.start(request("running", prompt(20), **LONG), DECODE)
        await target.some("running", 2)
    eventually(lambda: mixed.figure(RUNNING) == 0, 10, "the request ends")
    eventually(lambda: prefill.figure("baton_worker_handoffs_pinned") == 0, 10, "the handoff is released")


async def test_what_cannot_be_run_is_invalid_and_harms_nobody(mixed: Worker) -> None:
    long = request("too long", prompt(4000))
    unknown_token = request("unknown token", [5, 99_999])
    complete = request("complete", prompt(5), max_tokens=2)
    async with connected(mixed.address) as stream:
        assert "4000" in refused(await stream.run(long, DECODE), pb.Failed.CODE_INVALID)
        assert "99999" in refused(await stream.run(unknown_token, DECODE), pb.Failed.CODE_INVALID)
        got = await stream.run(complete, DECODE, written=[1, 2])
        assert "complete" in refused(got, pb.Failed.CODE_INVALID)
        got = await stream.run_raw(pb.Start(request_id="rubbish", epoch=1, phase=2, engine_request=b"\xc1"))
        assert "EngineCoreRequest" in refused(got, pb.Failed.CODE_INVALID)
        assert len((await stream.run(request("fine", prompt(9), max_tokens=2), DECODE)).tokens) == 2
        nothing = pb.Start(request_id="no phase", epoch=1, engine_request=b"")
        assert "phase 0" in refused(await stream.run_raw(nothing), pb.Failed.CODE_INVALID)


async def test_what_the_engine_refuses_fails_alone(mixed: Worker) -> None:
    """vLLM raises where it takes the request in, in the thread that steps: others write on."""
    pooling = request("pooling", prompt(20))
    pooling.pooling_params = PoolingParams(task="embed")
    before = mixed.figure("baton_worker_requests_refused_total")
    async with connected(mixed.address) as stream:
        await stream.start(request("beside a pooling one", prompt(20), max_tokens=60), DECODE)
        await stream.some("beside a pooling one", 3)
        got = await stream.run(pooling, DECODE)
        assert "Unsupported task: 'embed'" in refused(got, pb.Failed.CODE_INVALID)
        assert len((await stream.end("beside a pooling one")).tokens) == 60
        assert len((await stream.run(request("after it", prompt(9), max_tokens=2), DECODE)).tokens) == 2
    assert mixed.figure("baton_worker_requests_refused_total") == before + 1
    eventually(lambda: mixed.figure(RUNNING) == 0, 10, "nothing is left")


async def test_a_worker_runs_what_its_role_does_not_say(prefill: Worker) -> None:
    """Routers place from snapshots, and one side covers for the other: the role is the scheduler's matter."""
    async with connected(prefill.address) as stream:
        assert len((await stream.run(request("wrong role", prompt(5), max_tokens=7), DECODE)).tokens) == 7


async def test_a_full_worker_says_so(workers: Fleet) -> None:
    """Four routers have each been promised all of its room."""
    small = workers.started("decode", engine={"max_num_seqs": 2}, scheduler={"max_queue_factor": 1.5})
    async with contextlib.AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(connected(small.address)) for _ in range(4)]
        names = [[f"{router}, {n}" for n in range(3)] for router in range(4)]
        for n in range(3):
            for stream, mine in zip(routers, names, strict=True):
                await stream.start(request(mine[n], prompt(20, seed=n), max_tokens=1500), DECODE)
        refusals = []
        for stream, mine in zip(routers, names, strict=True):
            await stream.run_raw(pb.Start(request_id="last", epoch=1))  # invalid: all before it was answered
            refusals += [got for got in map(stream.got, mine) if got.failed is not None]
        eventually(lambda: small.figure(RUNNING) == 2, 10, "it is full")
        assert len(refusals) == 9
        for got in refusals:
            said = refused(got, pb.Failed.CODE_FULL)
            assert "3 of 3 requests: engine.max_num_seqs, scheduler.max_queue_factor" in said
        assert small.figure("baton_worker_requests_refused_total") == 9 + 4
    async with connected(small.address) as stream:
        eventually(lambda: small.figure(RUNNING) == 0, 10, "those routers are gone")
        await stream.start(request("fits", prompt(20, seed=1), max_tokens=1500), DECODE)
        await stream.some("fits", 2)
        # Told to drain: what runs goes on to its end, nothing new comes in.
        small.signal(15)
        eventually(lambda: not small.serving(), 10, "it drains")
        refused(await stream.run(request("late", prompt(20)), DECODE), pb.Failed.CODE_DRAINING)
        assert len((await stream.end("fits")).tokens) == 1500
    assert small.ended() == 0
