"""Handoffs between real workers: what the router is told, and requests that end without one."""

from harness.support import eventually
from tests.services.worker.router import (
    DECODE,
    PREFILL,
    FinishReason,
    StructuredOutputsParams,
    connected,
    prompt,
    request,
)

PINNED = "baton_worker_handoffs_pinned"


def nothing_pinned(worker):
    eventually(lambda: worker.figure(PINNED) == 0, 10, "nothing is pinned")


async def test_many_handoffs_at_once_equal_one_engine(prefill, mixed):
    cores = [request(f"many {n}", prompt(40 + 23 * n, seed=200 + n), max_tokens=10 + n) for n in range(12)]
    async with connected(prefill.address) as source, connected(mixed.address) as target:
        for core in cores:
            await source.start(core, PREFILL)
        begun = [await source.end(core.request_id) for core in cores]
        for core, one in zip(cores, begun, strict=True):
            assert one.saved is not None
            await target.start(core, DECODE, source=source.source(core))
        rests = [await target.end(core.request_id) for core in cores]
        for core, one, rest in zip(cores, begun, rests, strict=True):
            core.request_id = f"whole {core.request_id}"
            whole = await target.run(core, DECODE)
            assert one.tokens + rest.tokens == whole.tokens
            assert rest.finish == FinishReason.LENGTH
    nothing_pinned(prefill)  # each is released when it was pulled


async def test_a_request_that_ends_with_its_first_token_is_not_saved(prefill, mixed):
    tokens = prompt(64, seed=7)  # whole blocks
    async with connected(prefill.address) as source, connected(mixed.address) as target:
        one = await source.run(request("one token", tokens, max_tokens=1), PREFILL)
        whole = await target.run(request("where it stops", tokens, max_tokens=1), DECODE)
        core = request("stops", tokens, stop_token_ids=whole.tokens)
        got = await source.run(core, PREFILL)
    assert (got.tokens, got.finish, got.stop_reason) == (whole.tokens, FinishReason.STOP, whole.tokens[0])
    assert (one.tokens, one.finish) == (whole.tokens, FinishReason.LENGTH)
    assert one.saved is got.saved is None
    nothing_pinned(prefill)


async def test_min_tokens_does_not_keep_a_prefill_from_its_save(prefill):
    async with connected(prefill.address) as stream:
        got = await stream.run(request("at least 5", prompt(50, seed=8), min_tokens=5), PREFILL)
    assert got.finish is None
    assert got.saved is not None


async def test_clients_cannot_control_transfers(mixed):
    extra = {
        "kv_transfer_params": {"baton": "save", "epoch": 1, "do_remote_decode": True},
        "ec_transfer_params": {"x": 1},
        "baton_generated": 3,
        "baton_vocabulary": 1,
        "harmless": "kept",
    }
    plain = request("no extras", prompt(48, seed=9))
    core = request("with extras", prompt(48, seed=9), extra_args=extra)
    async with connected(mixed.address) as stream:
        whole = await stream.run(plain, DECODE)
        got = await stream.run(core, DECODE)
    assert (got.tokens, got.saved, got.admitted) == (whole.tokens, None, None)
    nothing_pinned(mixed)


async def test_metrics_count_a_handoff(prefill, mixed):
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
    async with connected(prefill.address) as source, connected(mixed.address) as target:
        await source.prefill(core)
        await target.run(core, DECODE, source=source.source(core))
    grown = [after - was for was, after in zip(before, figures(), strict=True)]
    assert grown[:2] == [1, 1]
    assert all(each > 0 for each in grown), grown


STEP = 256  # tokens


def long(name, which, **params):
    """Return a request whose prompt takes three steps."""
    return request(name, prompt(2 * STEP + 60 + which % 40, seed=which), **params)


async def test_requests_that_need_their_first_token_wait_for_it(prefill, mixed):
    grammar = StructuredOutputsParams(regex="[a-z]{24}")
    async with connected(prefill.address) as source, connected(mixed.address) as target:
        for core in (
            long("grammar", 540, structured_outputs=grammar),
            long("prompt logprobs", 541, prompt_logprobs=1),
            long("no prefix cache", 542, skip_reading_prefix_cache=True),
        ):
            await target.start(core, DECODE, source=source.source(core))
            begun = await source.prefill(core)
            rest = await target.end(core.request_id)
            assert rest.admitted is not None, rest.failed
            core.request_id = f"whole {core.request_id}"
            whole = await target.run(core, DECODE)
            assert begun.tokens + rest.tokens == whole.tokens
    nothing_pinned(prefill)
