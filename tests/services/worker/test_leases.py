"""Saved KV stays for as long as the router that asked for it may want it, however long that takes."""

from __future__ import annotations

import asyncio

from harness.support import eventually
from harness.workers import Fleet
from tests.services.worker.router import DECODE, PREFILL, connected, prompt, request

LEASE_S = 1.5  # a renewal each half second: a busy machine may stand still for one
SEQS = 2
PINNED = "baton_worker_handoffs_pinned"


async def test_handoffs_outlast_a_queue_that_is_longer_than_their_lease(workers: Fleet) -> None:
    """No prompt is computed again, and what nobody wants any more is released."""
    prefill = workers.start("prefill", scheduler={"placement_lease_s": LEASE_S / 2})
    decode = workers.started("decode", engine={"max_num_seqs": SEQS}, scheduler={"max_queue_factor": 3})
    eventually(prefill.serving, 60, "the prefill worker serves")
    cores = [request(f"queued {n}", prompt(70, seed=500 + n), max_tokens=200) for n in range(2 * SEQS)]
    before = [request(f"before {n}", prompt(20, seed=520 + n), max_tokens=3900) for n in range(SEQS)]
    unwanted = request("unwanted", prompt(70, seed=510))
    loop = asyncio.get_running_loop()
    async with connected(prefill.address) as source, connected(decode.address) as target:
        for core in [*cores, unwanted]:
            await source.start(core, PREFILL)
        begun = [await source.end(core.request_id) for core in cores]
        await source.end(unwanted.request_id)
        for core in before:  # vLLM loads nothing while its batch is full
            await target.start(core, DECODE)
            await target.some(core.request_id, 1)
        began = loop.time()
        for core, one in zip(cores, begun, strict=True):
            assert one.saved is not None
            await target.start(core, DECODE, source=source.source(core))
        held = before[0].request_id
        while loop.time() < began + 2 * LEASE_S:
            await target.some(held, len(target.got(held).tokens) + 1)
        assert prefill.figure(PINNED) == len(cores) + 1  # nothing was pulled meanwhile
        await target.abort(*(core.request_id for core in before))
        rests = [await target.end(core.request_id) for core in cores]
        assert [str(rest.failed) for rest in rests if rest.failed is not None] == []
        assert all(len(one.tokens + rest.tokens) == 200 for one, rest in zip(begun, rests, strict=True))
        assert prefill.figure(PINNED) == 1  # its router is there, and has said nothing
        await source.abort(unwanted.request_id)
        eventually(lambda: prefill.figure(PINNED) == 0, 10, "what was aborted is released")
        await source.run(unwanted, PREFILL, epoch=2)
    eventually(lambda: prefill.figure(PINNED) == 0, 10, "what a router that is gone had saved is released")
