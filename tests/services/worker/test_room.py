"""Prompts wait for room for their KV before they are computed."""

import pytest

from baton.protos import worker_pb2 as pb
from harness.support import eventually
from tests.services.worker.router import DECODE, PREFILL, kept, nothing_pinned, prompt, request

WAITING, USED = "baton_worker_requests_waiting", "baton_worker_kv_cache_usage_ratio"


@pytest.fixture(scope="module")
def prefill(workers):
    return workers.started("prefill", handoff={"staging_mib": 1})  # room for three prompts of 300 tokens


async def test_a_prompt_waits_for_room_and_is_refused_in_time(prefill, source):
    core = {name: request(name, prompt(300, seed=600 + n)) for n, name in enumerate("abcdef")}
    for name in "abc":
        await source.prefill(core[name])
    await source.start(core["d"], PREFILL)
    eventually(lambda: prefill.figure(WAITING) == 1, 10, "it waits")
    await source.abort("a")
    assert (await source.end("d")).saved.problem == ""
    got = await source.run(core["e"], PREFILL)  # there will be no room
    assert "StagingFull" in got.failure(pb.Failed.CODE_STAGING)
    assert got.tokens == []
    await source.abort("b")
    await source.prefill(core["f"])
    source.close()
    nothing_pinned(prefill)


async def test_a_prompt_larger_than_staging_is_handed_over_in_parts(prefill, source, target):
    core = request("large", prompt(1000, seed=610), max_tokens=8)
    begun = await source.prefill(core)
    manifest = (await kept(source.source(core))).manifest
    assert manifest.shards[0].slots < manifest.num_blocks / 2
    assert manifest.num_blocks * manifest.shards[0].record_bytes > 2**20 - 2**12
    eventually(lambda: prefill.figure(USED) > 0, 10, "blocks without a slot stay in the cache")
    rest = await target.run(core, DECODE, source=source.source(core))
    assert begun.tokens + rest.tokens == await target.alone(core)
    assert rest.admitted.blocks_pulled == manifest.num_blocks
    nothing_pinned(prefill)
    eventually(lambda: prefill.figure(USED) == 0, 10, "the blocks are freed")
