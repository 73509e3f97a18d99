"""Requests to a cluster of fake workers, and what their answers have to be."""

import re
from collections import deque

from baton.services.router.recovery import SHORT_PROMPT_TOKENS
from baton.services.router.vllm.engine_client import RefusedByRouter
from harness import scheduling
from harness.fake_worker import answer, until

PROMPT = [5, 6, 7]
LONG = [1] * (SHORT_PROMPT_TOKENS + 1)


def right(got, prompt, count):
    assert got.error is None
    assert (got.tokens, got.reason) == (answer(prompt, count), "length")


def refused(got, because, tokens=()):
    """Return the status of a request that got nothing but these tokens and an error."""
    assert got.tokens == [*tokens]
    assert isinstance(got.error, RefusedByRouter)
    assert re.search(because, str(got.error))
    return int(got.error.http_status)


def share(workers, *faults):
    """Give workers a common queue of faults: each happens once, on any of them."""
    shared = deque(faults)
    for worker in workers:
        worker.faults = shared
    return shared


async def booked(cluster, worker_id, **reserved):
    """Wait until the scheduler has this much booked on a worker."""

    async def is_so():
        workers = (await cluster.scheduler.describe()).workers
        [worker] = [one for one in workers if one.identity.worker_id == worker_id]
        return all(getattr(worker, f"reserved_{name}") == value for name, value in reserved.items())

    await scheduling.until(is_so, 20)


async def recorded(cluster):
    """Return the record of the only request, which ends."""
    await cluster.settled()
    (record,) = cluster.chronicle.recent.last()
    return record


async def fill(cluster):
    """Send requests until one waits; return their ids."""
    sent = []
    while len(cluster.waiting) == 0:
        sent.append(f"full{len(sent)}")
        await cluster.send(sent[-1], [0])
        state = cluster.client._relays[sent[-1]].state
        await until(lambda state=state: state.attempts or len(cluster.waiting), "it is placed or waits")
    return sent
