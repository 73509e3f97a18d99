"""A chat's KV on one worker is used for its next turn on another.

`target` decodes the first turn, and `source` prefills the second one.
"""

import pytest

from baton.attempts import prefix_id
from baton.protos import worker_pb2 as pb
from harness.support import eventually
from tests.services.worker.router import DECODE, PREFILL, SAVE, kept, nothing_pinned, prompt, request

BLOCK = 32
ANSWER = 40


async def chat(decode, name, seed):
    """Run a first turn; return the second one, and how many of its tokens the worker has cached."""
    first = request(f"{name}, first turn", prompt(200, seed), max_tokens=ANSWER)
    answer = await decode.run(first, DECODE)
    asked = [*prompt(200, seed), *answer.tokens]
    held = (len(asked) - 1) // BLOCK * BLOCK  # the last token has no KV
    return request(name, [*asked, *prompt(100, seed + 1)]), held


async def save(stream, core, held):
    name = prefix_id(core.request_id)
    got = await stream.run(core, SAVE, prefix_tokens=held + 1, name=name)
    assert got.saved is not None, got.failed
    return stream.source(core, name=name, tokens=held + 1)


async def test_the_next_turn_computes_only_its_own_tokens(prefill, mixed, source, target):
    core, held = await chat(target, "turn: chat", 700)
    beginning = await save(target, core, held)
    complete = await kept(beginning)
    assert (complete.manifest.num_tokens, list(complete.token_ids)) == (held + 1, [])
    begun = await source.run(core, PREFILL, source=beginning)
    assert begun.admitted.tokens == held + 1  # the last block is not full
    assert begun.admitted.blocks_pulled == held // BLOCK + 1
    assert begun.saved is not None
    rest = await target.run(core, DECODE, source=source.source(core))
    assert begun.tokens + rest.tokens == await target.alone(core)
    nothing_pinned(mixed)  # released when it was pulled
    nothing_pinned(prefill)


async def test_a_beginning_that_is_not_cached_is_refused_and_not_computed(mixed, target):
    core = request("turn: never seen", prompt(300, seed=710))
    got = await target.run(core, SAVE, prefix_tokens=257, name=prefix_id("turn: never seen"))
    assert "lacks 257 of 257 tokens" in got.failure(pb.Failed.CODE_HANDOFF)
    assert not got.tokens
    # It is not in the prefix cache afterwards either.
    again = await target.run(core, SAVE, prefix_tokens=257, name=prefix_id("turn: never seen"), epoch=2)
    assert "lacks 257 of 257 tokens" in again.failure(pb.Failed.CODE_HANDOFF)
    eventually(lambda: mixed.figure("baton_worker_requests_waiting") == 0, 10, "it has ended")
    nothing_pinned(mixed)


async def test_kv_of_another_tenant_is_not_handed_over(target):
    core, held = await chat(target, "turn: salted", 720)
    core.cache_salt = "another tenant"
    got = await target.run(core, SAVE, prefix_tokens=held + 1, name=prefix_id("turn: salted"))
    assert got.failed.code == pb.Failed.CODE_HANDOFF


async def test_a_beginning_is_shorter_than_its_prompt(target):
    core = request("no beginning", prompt(64, seed=730))
    for tokens in (0, 64, 65):
        got = await target.run(core, SAVE, prefix_tokens=tokens, name=f"no beginning {tokens}")
        assert got.failed.code == pb.Failed.CODE_INVALID


async def test_a_prompt_may_start_before_its_beginning_is_saved(prefill, mixed, source, target):
    core, held = await chat(target, "turn: at once", 760)
    name = prefix_id(core.request_id)
    await source.start(core, PREFILL, source=target.source(core, name=name, tokens=held + 1))
    await target.start(core, SAVE, prefix_tokens=held + 1, name=name)
    begun = await source.end(core.request_id)
    assert begun.admitted is not None, "it took longer than a second to save it"
    assert begun.admitted.tokens == held + 1
    await source.abort(core.request_id)
    nothing_pinned(mixed)
    nothing_pinned(prefill)


@pytest.mark.parametrize("how", ["released", "never asked for"])
async def test_a_beginning_that_does_not_arrive_is_computed(prefill, mixed, source, target, how):
    core, held = await chat(target, f"turn: {how}", 740)
    beginning = target.source(core, name=prefix_id(core.request_id), tokens=held + 1)
    if how == "released":
        await save(target, core, held)
        await target.abort(prefix_id(core.request_id))
        nothing_pinned(mixed)
    begun = await source.run(core, PREFILL, source=beginning)
    assert begun.admitted is None
    assert begun.saved is not None, begun.failed
    await source.abort(core.request_id)
    assert begun.tokens == (await target.alone(core))[:1]
    nothing_pinned(prefill)
