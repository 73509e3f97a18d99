"""Prompts wait for room for their KV before they are computed."""

import pytest

from baton.protos import worker_pb2 as pb
from harness.support import eventually
from tests.services.worker.router import DECODE, PREFILL, connected, kept, prompt, request

WAITING, PINNED = "baton_worker_requests_waiting", "baton_worker_handoffs_pinned"
USED = "baton_worker_kv_cache_usage_ratio"


@pytest.fixture(scope="module")
def worker(workers):
    return workers.started("prefill", handoff={"staging_mib": 1})  # room for three prompts of 300 tokens


async def test_a_prompt_waits_for_room_and_is_refused_in_time(worker):
    core = {name: request(name, prompt(300, seed=600 + n)) for n, name in enumerate("abcdef")}
    async with connected(worker.address) as stream:
        for name in "abc":
            await stream.prefill(core[name])
        await stream.start(core["d"], PREFILL)
        eventually(lambda: worker.figure(WAITING) == 1, 10, "it waits")
        await stream.abort("a")
        saved = (await stream.end("d")).saved
        assert saved.problem == ""
        got = await stream.run(core["e"], PREFILL)  # there will be no room
        assert got.failed.code == pb.Failed.CODE_STAGING
        assert "StagingFull" in got.failed.message
        assert got.tokens == []
        await stream.abort("b")
        await stream.prefill(core["f"])
    eventually(lambda: worker.figure(PINNED) == 0, 10, "all is released")


async def test_a_prompt_larger_than_staging_is_handed_over_in_parts(worker, mixed):
    core = request("large", prompt(1000, seed=610), max_tokens=8)
    async with connected(worker.address) as source, connected(mixed.address) as target:
        begun = await source.prefill(core)
        manifest = (await kept(source.source(core))).manifest
        assert manifest.shards[0].slots < manifest.num_blocks / 2
        assert manifest.num_blocks * manifest.shards[0].record_bytes > 2**20 - 2**12
        eventually(lambda: worker.figure(USED) > 0, 10, "blocks without a slot stay in the cache")
        rest = await target.run(core, DECODE, source=source.source(core))
        core.request_id = "large, whole"
        whole = await target.run(core, DECODE)
    assert begun.tokens + rest.tokens == whole.tokens
    assert rest.admitted.blocks_pulled == manifest.num_blocks
    eventually(lambda: worker.figure(PINNED) == 0, 10, "all is released")
    eventually(lambda: worker.figure(USED) == 0, 10, "the blocks are freed")
