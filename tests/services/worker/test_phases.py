"""Handoffs between real workers: what the router is told, and requests that end without one."""

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import FinishReason

from baton.handoff.manifest import seal
from baton.protos import worker_pb2 as pb
from baton.protos.worker_pb2 import FollowReply
from harness.support import free_port
from tests.services.worker.router import DECODE, PREFILL, kept, nothing_pinned, prompt, request, telling


async def test_many_handoffs_at_once_equal_one_engine(prefill, source, target):
    cores = [request(f"many {n}", prompt(40 + 23 * n, seed=200 + n), max_tokens=10 + n) for n in range(12)]
    for core in cores:
        await source.start(core, PREFILL)
    begun = [await source.end(core.request_id) for core in cores]
    for core, one in zip(cores, begun, strict=True):
        assert one.saved is not None
        await target.start(core, DECODE, source=source.source(core))
    rests = [await target.end(core.request_id) for core in cores]
    for core, one, rest in zip(cores, begun, rests, strict=True):
        assert one.tokens + rest.tokens == await target.alone(core)
        assert rest.finish == FinishReason.LENGTH
    nothing_pinned(prefill)  # each is released when it was pulled


async def test_a_request_that_ends_with_its_first_token_is_not_saved(prefill, source, target):
    tokens = prompt(64, seed=7)  # whole blocks
    one = await source.run(request("one token", tokens, max_tokens=1), PREFILL)
    whole = await target.run(request("where it stops", tokens, max_tokens=1), DECODE)
    core = request("stops", tokens, stop_token_ids=whole.tokens)
    got = await source.run(core, PREFILL)
    assert (got.tokens, got.finish, got.stop_reason) == (whole.tokens, FinishReason.STOP, whole.tokens[0])
    assert (one.tokens, one.finish) == (whole.tokens, FinishReason.LENGTH)
    assert one.saved is got.saved is None
    nothing_pinned(prefill)


async def test_clients_cannot_control_transfers(mixed, target):
    extra = {
        "kv_transfer_params": {"baton": "save", "epoch": 1, "do_remote_decode": True},
        "ec_transfer_params": {"x": 1},
        "baton_generated": 3,
        "baton_vocabulary": 1,
        "harmless": "kept",
    }
    plain = request("no extras", prompt(48, seed=9))
    core = request("with extras", prompt(48, seed=9), extra_args=extra)
    whole = await target.run(plain, DECODE)
    got = await target.run(core, DECODE)
    assert (got.tokens, got.saved, got.admitted) == (whole.tokens, None, None)
    nothing_pinned(mixed)


async def test_cached_blocks_are_not_pulled(source, target):
    tokens = prompt(200, seed=10)
    whole = await target.run(request("first", tokens), DECODE)
    core = request("second", tokens)
    begun = await source.prefill(core)
    rest = await target.run(core, DECODE, source=source.source(core))
    assert begun.tokens + rest.tokens == whole.tokens
    assert rest.admitted.blocks_pulled == 1  # 1 of 7: the last one, which is not full


async def test_a_released_handoff_fails_by_name(prefill, source, target):
    core = request("released", prompt(100, seed=11))
    begun = await source.prefill(core)
    await source.abort("released")
    nothing_pinned(prefill)
    failed = await target.run(core, DECODE, source=source.source(core))
    assert "released" in failed.failure(pb.Failed.CODE_HANDOFF)
    assert failed.finish is None
    # The next attempt computes here.
    rest = await target.run(core, DECODE, epoch=2, written=begun.tokens)
    assert begun.tokens + rest.tokens == await target.alone(core)


async def test_a_source_that_cannot_be_reached_is_named(source, target):
    core = request("far away", prompt(100, seed=14))
    await source.prefill(core)
    complete = await kept(source.source(core))
    for shard in complete.manifest.shards:
        del shard.offers["shm"]
        shard.address = f"127.0.0.1:{free_port()}"
    seal(complete.manifest)
    async with telling(source.source(core), FollowReply(complete=complete)) as other:
        failed = await target.run(core, DECODE, source=other)
    assert failed.failed.code == pb.Failed.CODE_SOURCE


async def test_seeded_prompts_of_several_steps_do_not_kill_the_engine(target):
    """vLLM alone crashes here on a CPU."""

    def core(name, n, **params):
        return request(f"{name} {n}", prompt(600, seed=300 + n), temperature=1.0, seed=n, **params)

    alone = [await target.run(core("alone", n), DECODE) for n in range(3)]
    for n in range(3):
        await target.start(core("together", n, skip_reading_prefix_cache=True), DECODE)
    together = [await target.end(f"together {n}") for n in range(3)]
    assert [got.tokens for got in together] == [got.tokens for got in alone]


async def test_metrics_count_a_handoff(prefill, mixed, source, target):
    names = {
        prefill: ("generated_tokens", "handoffs_saved", "engine_step_seconds_count", "prefix_cache_queries"),
        mixed: ("handoffs_loaded", "handoff_bytes", "handoff_total_seconds_count"),
    }

    def figures():
        return [
            worker.figure(f"baton_worker_{name}" if name.endswith("count") else f"baton_worker_{name}_total")
            for worker, of_worker in names.items()
            for name in of_worker
        ]

    before = figures()
    core = request("measured", prompt(100, seed=400))
    await source.prefill(core)
    await target.run(core, DECODE, source=source.source(core))
    grown = [after - was for was, after in zip(before, figures(), strict=True)]
    assert grown[:2] == [1, 1]
    assert all(each > 0 for each in grown), grown


STEP = 256  # tokens


def long(name, which, **params):
    """Return a request whose prompt takes three steps."""
    return request(name, prompt(2 * STEP + 60 + which % 40, seed=which), **params)


async def test_a_longer_prompt_is_pulled_while_it_is_prefilled(prefill, source, target):
    """Test everything that depends on where the output begins: penalties, seeds, logprobs, min_tokens."""
    cores = [
        long("early", 500),
        long("early seeded", 501, temperature=1.0, seed=3),
        long("early penalised", 502, presence_penalty=1.5, frequency_penalty=1.0, min_tokens=8),
        long("early logprobs", 503, logprobs=2),
    ]
    for core in cores:
        await target.start(core, DECODE, source=source.source(core))
        begun = await source.run(core, PREFILL)
        assert begun.saved.chunks == 3
        rest = await target.end(core.request_id)
        assert rest.admitted is not None, rest.failed
        assert rest.admitted.bytes > 0
        assert rest.admitted.early_bytes <= rest.admitted.bytes
        assert begun.tokens + rest.tokens == await target.alone(core)
        assert len(rest.logprobs) == (len(rest.tokens) if core.sampling_params.logprobs else 0)
    nothing_pinned(prefill)


async def test_an_aborted_handoff_can_be_tried_again(prefill, source, target):
    core = long("dropped", 510)
    await target.start(core, DECODE, source=source.source(core))
    await source.start(core, PREFILL)
    await target.abort("dropped")
    await source.abort("dropped")
    await target.start(core, DECODE, epoch=2, source=source.source(core))
    begun = await source.prefill(core, epoch=2)
    rest = await target.end("dropped")
    assert len(begun.tokens + rest.tokens) == 24
    nothing_pinned(prefill)


async def test_an_aborted_prefill_fails_its_decode(prefill, source, target):
    for which in range(520, 540):
        core = long(f"given up {which}", which)
        await target.start(core, DECODE, source=source.source(core))
        await source.start(core, PREFILL)
        await source.abort(core.request_id)
        got = await target.end(core.request_id)
        if got.failed is None:
            continue  # its prompt was already complete
        assert got.failed.code == pb.Failed.CODE_HANDOFF
        # The next attempt computes here.
        got = await target.run(core, DECODE, epoch=2, written=[1])
        assert (got.failed, len(got.tokens)) == (None, 23)
        break
    else:
        raise AssertionError("all prompts were complete before they were aborted")
    nothing_pinned(prefill)


async def test_requests_that_need_their_first_token_wait_for_it(prefill, source, target):
    grammar = StructuredOutputsParams(regex="[a-z]{24}")
    for core in (
        long("grammar", 540, structured_outputs=grammar),
        long("prompt logprobs", 541, prompt_logprobs=1),
        long("no prefix cache", 542, skip_reading_prefix_cache=True),
    ):
        await target.start(core, DECODE, source=source.source(core))
        begun = await source.prefill(core)
        rest = await target.end(core.request_id)
        assert rest.admitted is not None, rest.failed
        assert begun.tokens + rest.tokens == await target.alone(core)
    nothing_pinned(prefill)
