"""The scheduler knows a worker's cached blocks, by the keys that routers use."""

from itertools import count

from baton.scheduler.client import SchedulerClient
from baton.services.router.vllm.block_hashes import PromptHasher
from harness.scheduling import place, until
from tests.services.worker.router import DECODE, hello, prompt, request

BLOCK = 32
_numbers = count()


async def reserved(client, worker):
    workers = (await client.describe()).workers
    return next(one.reserved_prompt_tokens for one in workers if one.identity.worker_id == worker.name)


async def booked(client, worker, tokens, keys):
    """Place a prompt on the worker; return the prompt tokens booked, which are those not cached."""
    others = [one.identity.worker_id for one in (await client.describe()).workers]
    others.remove(worker.name)
    placed = await place(client, f"ask-{next(_numbers)}", 1, tokens, 1, *others, prefix=keys)
    assert placed.prefill is None
    assert placed.decode.worker_id == worker.name
    found = await reserved(client, worker)
    client.reports.finished(placed.attempt, "abort")

    async def released():
        return await reserved(client, worker) == 0

    await until(released)
    return found


async def test_cached_blocks_are_known_by_the_routers_keys(mixed, target):
    tokens = prompt(5 * BLOCK + 7, seed=901)
    async with SchedulerClient(mixed.scheduler, router_id="asks") as client:
        told = await hello(mixed.address)
        hashing = told.identity.capacity.hashing
        assert (hashing.tokens, hashing.every, hashing.algorithm) == (BLOCK, 1, "sha256")
        hasher = PromptHasher(hashing)
        keys = hasher.keys(request("keys", tokens))
        assert await booked(client, mixed, len(tokens), keys) == len(tokens)
        await target.run(request("cached", tokens, max_tokens=1), DECODE)

        async def known():
            return await booked(client, mixed, len(tokens), keys) == 7

        await until(known, 10)
        half = hasher.keys(request("keys", [*tokens[: 3 * BLOCK], *prompt(2 * BLOCK, seed=902)]))
        assert await booked(client, mixed, 5 * BLOCK, half) == 2 * BLOCK
        salted = request("keys", tokens)
        salted.cache_salt = "another"
        assert await booked(client, mixed, len(tokens), hasher.keys(salted)) == len(tokens)
