"""Saved KV is kept as long as its router may need it."""

import asyncio

from harness import breaking
from harness.support import eventually
from tests.services.worker.router import DECODE, PINNED, PREFILL, connected, prompt, request

LEASE_S = 1.5  # renewed every 0.5 s, so one renewal may be late on a busy machine
SEQS = 2


async def test_handoffs_wait_longer_than_their_lease(workers):
    """No prompt is computed again, and released handoffs are freed."""
    module = "baton.services.config.workers"
    shorter = {f"{module}:PLACEMENT_LEASE": LEASE_S / 2 / 5.0}  # in leases of 5 s
    prefill = workers.start("prefill", constants=shorter)
    room = {f"{module}:MAX_QUEUE_FACTOR": 3.0}
    decode = workers.started("decode", constants=room, engine=breaking.ENGINE | {"max_num_seqs": SEQS})
    eventually(prefill.serving, 60, "the prefill worker serves")
    cores = [request(f"queued {n}", prompt(70, seed=500 + n), max_tokens=10) for n in range(2 * SEQS)]
    long = {"max_tokens": 3900, "extra_args": breaking.SLOW}
    before = [request(f"before {n}", prompt(20, seed=520 + n), **long) for n in range(SEQS)]
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
        assert prefill.figure(PINNED) == len(cores) + 1  # nothing was pulled
        await target.abort(*(core.request_id for core in before))
        rests = [await target.end(core.request_id) for core in cores]
        assert [str(rest.failed) for rest in rests if rest.failed is not None] == []
        assert all(len(one.tokens + rest.tokens) == 10 for one, rest in zip(begun, rests, strict=True))
        assert prefill.figure(PINNED) == 1  # its router has not released it
        await source.abort(unwanted.request_id)
        eventually(lambda: prefill.figure(PINNED) == 0, 10, "the aborted one is released")
        await source.run(unwanted, PREFILL, epoch=2)
    eventually(lambda: prefill.figure(PINNED) == 0, 10, "the end of the stream releases it")
