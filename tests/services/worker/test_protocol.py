"""The worker's gRPC service: Hello, epochs, aborts, refusals."""

from vllm.pooling_params import PoolingParams

from baton.handoff import transports
from baton.protos import worker_pb2 as pb
from harness.support import eventually
from tests.services.worker.router import DECODE, hello, prompt, request

LONG = {"max_tokens": 3900}  # does not end during a test
RUNNING = "baton_worker_requests_running"


def refused(got):
    assert (got.tokens, got.finish, got.saved) == ([], None, None)
    return got.failure()


async def test_hello_identifies_the_worker(mixed):
    reply = await hello(mixed.address)
    assert reply.refusal == ""
    identity = reply.identity
    assert (identity.worker_id, identity.address, identity.model) == (mixed.name, mixed.address, "tiny")
    assert (identity.capacity.block_size, identity.capacity.num_blocks) == (32, 4096)
    assert list(identity.capacity.transports) == transports.usable(None)
    assert identity.capacity.lookahead_tokens == 1
    assert len(identity.capacity.compatibility_hash) >= 32


async def test_hello_refuses_other_versions_and_names_both_sides(mixed):
    other_model = (await hello(mixed.address, model="other")).refusal
    assert "'other'" in other_model
    assert "'tiny'" in other_model
    older = (await hello(mixed.address, protocol=0)).refusal
    assert "speaks protocol 0" in older
    assert "run the same version of Baton" in older
    other_vllm = (await hello(mixed.address, vllm_version="0.9.1")).refusal
    assert "0.9.1" in other_vllm
    assert "0.32.0" in other_vllm


async def test_a_later_epoch_replaces_the_earlier_one(mixed, target):
    """It replaces the first attempt while that runs on the same worker."""
    tokens = prompt(30, seed=3)
    whole = await target.run(request("whole epoch", tokens, max_tokens=60), DECODE)
    await target.start(request("twice", tokens, **LONG), DECODE, epoch=1)
    begun = await target.some("twice", 5)
    seen = list(begun.tokens)
    got = await target.run(request("twice", tokens, max_tokens=60), DECODE, epoch=2, written=seen)
    assert seen + got.tokens[-(60 - len(seen)) :] == whole.tokens
    assert len(got.tokens) < LONG["max_tokens"] / 2
    eventually(lambda: mixed.figure(RUNNING) == 0, 10, "the first attempt ends")


async def test_abort_ends_a_request_at_once(mixed, target):
    await target.start(request("aborted", prompt(20), **LONG), DECODE)
    await target.some("aborted", 3)
    await target.abort("aborted", "never heard of")
    eventually(lambda: mixed.figure(RUNNING) == 0, 10, "it stops running")
    beside = await target.run(request("beside", prompt(20), max_tokens=3), DECODE)
    assert len(beside.tokens) == 3


async def test_blocks_shared_by_two_answers_are_reported(mixed, target):
    """Their common prefix takes room only once."""
    tokens = prompt(100, seed=77)
    await target.start(request("held first", tokens, **LONG), DECODE)
    assert (await target.some("held first", 2)).shared == 0
    await target.start(request("held too", [*tokens, 9, 9, 9], **LONG), DECODE)
    assert (await target.some("held too", 2)).shared == 3  # blocks of 32 tokens
    await target.abort("held first", "held too")
    eventually(lambda: mixed.figure(RUNNING) == 0, 10, "they end")
    alone = await target.run(request("cached alone", tokens, max_tokens=4), DECODE)
    assert alone.shared == 0  # cached, but not in use


async def test_invalid_requests_are_refused_and_others_continue(target):
    long = request("too long", prompt(4000))
    unknown_token = request("unknown token", [5, 99_999])
    complete = request("complete", prompt(5), max_tokens=2)
    assert "4000" in refused(await target.run(long, DECODE))
    assert "99999" in refused(await target.run(unknown_token, DECODE))
    got = await target.run(complete, DECODE, written=[1, 2])
    assert "complete" in refused(got)
    got = await target.run_raw(pb.Start(request_id="rubbish", epoch=1, phase=2, engine_request=b"\xc1"))
    assert "EngineCoreRequest" in refused(got)
    assert len((await target.run(request("fine", prompt(9), max_tokens=2), DECODE)).tokens) == 2
    nothing = pb.Start(request_id="no phase", epoch=1, engine_request=b"")
    assert "phase 0" in refused(await target.run_raw(nothing))


async def test_a_request_that_vllm_refuses_fails_alone(mixed, target):
    """vLLM raises in the engine's thread."""
    pooling = request("pooling", prompt(20))
    pooling.pooling_params = PoolingParams(task="embed")
    before = mixed.figure("baton_worker_requests_refused_total")
    await target.start(request("beside a pooling one", prompt(20), max_tokens=60), DECODE)
    await target.some("beside a pooling one", 3)
    got = await target.run(pooling, DECODE)
    assert "Unsupported task: 'embed'" in refused(got)
    assert len((await target.end("beside a pooling one")).tokens) == 60
    assert len((await target.run(request("after it", prompt(9), max_tokens=2), DECODE)).tokens) == 2
    assert mixed.figure("baton_worker_requests_refused_total") == before + 1
    eventually(lambda: mixed.figure(RUNNING) == 0, 10, "nothing is left")
