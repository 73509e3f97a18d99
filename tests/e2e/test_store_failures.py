"""Scheduler and Redis die, hang and come back under load: clients get only right answers.

Two failures of Redis are enough here, because placed requests do not depend on the store; the store's own
tests cover the others.
"""

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc
import pytest

from harness.deployment import MODEL_NAME, START_S, Deployment, deployment
from harness.greedy import GREEDY, Load, ask
from harness.prompts import prompts
from harness.scheduling import RedisServer
from harness.support import eventually, freeze

WORKER_LEASE_S = 2.0
LEASE_S = 3 * WORKER_LEASE_S  # of placements
CLIENTS = 2  # clients that send one request after another
ANSWERS = 3  # answers in every phase of a failure
TOKENS = 4
LONG_TOKENS = 60


@dataclass
class Site:
    redis: RedisServer
    deployment: Deployment
    undisturbed: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    async def answer(self, client, prompt, tokens):
        """Return the answer without a failure; request it only once."""
        if (prompt, tokens) not in self.undisturbed:
            self.undisturbed[prompt, tokens] = await ask(client, prompts()[prompt], tokens)
        return self.undisturbed[prompt, tokens]

    def scheduler(self):
        return self.deployment.scheduler_process()

    def store_problem(self):
        return self.deployment.describe().store_problem

    def holds(self):
        """Return the number of attempts and reservations that the scheduler holds."""
        description = self.deployment.describe()
        return len(description.attempts) + sum(one.reserved_requests for one in description.workers)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    redis = RedisServer(folder)
    scheduler = {"store": redis.url, "worker_lease_s": WORKER_LEASE_S}
    with redis, deployment(folder / "baton", scheduler=scheduler) as one:
        one.up(0, 0, mixed=1)
        # The first request compiles, which would look like a pause.
        warm = one.client(timeout=START_S).completions
        warm.create(model=MODEL_NAME, prompt=prompts()[4], max_tokens=LONG_TOKENS, **GREEDY)
        yield Site(redis, one)


async def missed(site):
    """Wait until the scheduler reports that its store is unreachable."""
    seen = partial(eventually, lambda: "does not answer" in site.store_problem(), 10, "the store is missed")
    await asyncio.to_thread(seen)


@asynccontextmanager
async def redis_dies(site):
    site.redis.stop()
    try:
        await missed(site)
        yield
    finally:
        site.redis.start()  # empty


@asynccontextmanager
async def redis_hangs(site):
    site.redis.hang()
    try:
        await missed(site)
        yield
    finally:
        site.redis.wake()


@asynccontextmanager
async def the_scheduler_dies(site):
    site.scheduler().kill()  # `baton up` starts another
    yield


@asynccontextmanager
async def the_scheduler_hangs(site):
    """Stop the scheduler for longer than workers' leases, so that all workers seem dead to it."""
    process = site.scheduler()
    freeze(process.pid)
    hung = time.monotonic()
    try:
        yield
        await asyncio.sleep(max(0.0, hung + 1.2 * WORKER_LEASE_S - time.monotonic()))
    finally:
        process.resume()


FAILURES = [redis_dies, redis_hangs, the_scheduler_dies, the_scheduler_hangs]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
async def test_requests_continue(site, failure):
    async with site.deployment.async_client() as client:
        expected = [await site.answer(client, number, TOKENS) for number in range(CLIENTS)]
        long = await site.answer(client, 4, LONG_TOKENS)
        running = asyncio.create_task(ask(client, prompts()[4], LONG_TOKENS))
        load = Load(client, expected, CLIENTS)
        try:
            await load.more(ANSWERS)
            async with failure(site):
                await load.more(ANSWERS)
            await load.more(ANSWERS)
            assert await running == long
        finally:
            await load.end()
    print(f"{load.answered} answers, the slowest after {load.longest_s:.2f} s")
    eventually(lambda: answers(lambda: not site.store_problem()), 20, "the store is in use again")
    eventually(lambda: answers(lambda: not site.holds()), 2 * LEASE_S, "nothing is held")
    eventually(lambda: len(site.deployment.workers("mixed")) == 1, 10, "the worker is known")
    assert site.deployment.healthy()


def answers(look):
    """Return what `look` returns; False while the scheduler starts."""
    try:
        return look()
    except grpc.RpcError:
        return False
