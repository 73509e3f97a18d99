"""A chat's KV on one worker is used for its next turn on another."""

import pytest

from baton.attempts import prefix_id
from baton.protos import worker_pb2 as pb
from harness.support import eventually
from tests.services.worker.router import DECODE, PREFILL, SAVE, connected, kept, prompt, request
from tests.services.worker.test_phases import nothing_pinned

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


async def test_the_next_turn_computes_only_its_own_tokens(prefill, mixed):
    async with connected(prefill.address) as reader, connected(mixed.address) as writer:
        core, held = await chat(writer, "turn: chat", 700)
        source = await save(writer, core, held)
        complete = await kept(source)
        assert (complete.manifest.num_tokens, list(complete.token_ids)) == (held + 1, [])
        begun = await reader.run(core, PREFILL, source=source)
        assert begun.admitted.tokens == held + 1  # the last block is not full
        assert begun.admitted.blocks_pulled == held // BLOCK + 1
        assert begun.saved is not None
        rest = await writer.run(core, DECODE, source=reader.source(core))
        core.request_id = "turn: the same, alone"
        whole = await writer.run(core, DECODE)
    assert begun.tokens + rest.tokens == whole.tokens
    nothing_pinned(mixed)  # released when it was pulled
    nothing_pinned(prefill)


async def test_a_beginning_that_is_not_cached_is_refused_and_not_computed(mixed):
    core = request("turn: never seen", prompt(300, seed=710))
    async with connected(mixed.address) as stream:
        got = await stream.run(core, SAVE, prefix_tokens=257, name=prefix_id("turn: never seen"))
        assert got.failed.code == pb.Failed.CODE_HANDOFF
        assert "lacks 257 of 257 tokens" in got.failed.message
        assert not got.tokens
        # It is not in the prefix cache afterwards either.
        again = await stream.run(core, SAVE, prefix_tokens=257, name=prefix_id("turn: never seen"), epoch=2)
        assert "lacks 257 of 257 tokens" in again.failed.message
    eventually(lambda: mixed.figure("baton_worker_requests_waiting") == 0, 10, "it has ended")
    nothing_pinned(mixed)


async def test_kv_of_another_tenant_is_not_handed_over(mixed):
    async with connected(mixed.address) as stream:
        core, held = await chat(stream, "turn: salted", 720)
        core.cache_salt = "another tenant"
        got = await stream.run(core, SAVE, prefix_tokens=held + 1, name=prefix_id("turn: salted"))
    assert got.failed.code == pb.Failed.CODE_HANDOFF


async def test_a_beginning_is_shorter_than_its_prompt(mixed):
    core = request("no beginning", prompt(64, seed=730))
    async with connected(mixed.address) as stream:
        for tokens in (0, 64, 65):
            got = await stream.run(core, SAVE, prefix_tokens=tokens, name=f"no beginning {tokens}")
            assert got.failed.code == pb.Failed.CODE_INVALID


async def test_a_prompt_may_start_before_its_beginning_is_saved(prefill, mixed):
    async with connected(prefill.address) as reader, connected(mixed.address) as writer:
        core, held = await chat(writer, "turn: at once", 760)
        name = prefix_id(core.request_id)
        await reader.start(core, PREFILL, source=writer.source(core, name=name, tokens=held + 1))
        await writer.start(core, SAVE, prefix_tokens=held + 1, name=name)
        begun = await reader.end(core.request_id)
        assert begun.admitted is not None, "it took longer than a second to save it"
        assert begun.admitted.tokens == held + 1
        await reader.abort(core.request_id)
    nothing_pinned(mixed)
    nothing_pinned(prefill)


@pytest.mark.parametrize("how", ["released", "never asked for"])
async def test_a_beginning_that_does_not_arrive_is_computed(prefill, mixed, how):
    async with connected(prefill.address) as reader, connected(mixed.address) as writer:
        core, held = await chat(writer, f"turn: {how}", 740)
        source = writer.source(core, name=prefix_id(core.request_id), tokens=held + 1)
        if how == "released":
            await save(writer, core, held)
            await writer.abort(prefix_id(core.request_id))
            nothing_pinned(mixed)
        begun = await reader.run(core, PREFILL, source=source)
        assert begun.admitted is None
        assert begun.saved is not None, begun.failed
        core.request_id = f"turn: {how}, alone"
        whole = await writer.run(core, DECODE)
        await reader.abort(f"turn: {how}")
    assert begun.tokens == whole.tokens[:1]
    nothing_pinned(prefill)
