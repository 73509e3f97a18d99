"""Closed loops of many clients: each sends its next request as soon as its answer is whole.

They are several processes, as one could not read the tokens of hundreds of streams. Requests of the first
quarter of the time do not count, as all clients begin at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.pool import Pool

from bench.light import TIMEOUT_S, Client, Reply, body
from bench.served import no_pauses
from harness.stats import percentile

PROMPT, ANSWER = 256, 64  # tokens of a request
CLIENTS = 4  # processes
EACH = 16  # clients of one process at least
READY_S = 60.0  # for the processes to import this
SOON_S = 0.2  # until all processes have a job
SLACK_S = 10.0  # for a process to send its figures
Figures = dict[str, float]
Seen = tuple[float, float, bool, list[float]]  # asked, done, whether it was whole, arrivals of events


@contextmanager
def client_processes() -> Iterator[Pool]:
    """Start the processes, and wait until all of them can begin at once."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(CLIENTS + 1)
    with context.Pool(CLIENTS, ready.wait, (READY_S,)) as pool:
        ready.wait(READY_S)
        yield pool


def closed(pool: Pool, url: str, model: str, clients: int, seconds: float, seed: int) -> Figures:
    """Return the figures of a closed loop of so many clients. Raises RuntimeError if no answer was whole."""
    parts = max(1, min(CLIENTS, clients // EACH))
    shares = [clients // parts + (number < clients % parts) for number in range(parts)]
    begin = time.perf_counter() + SOON_S  # all processes of a machine have this clock
    port = int(url.rpartition(":")[2])
    jobs = [
        (port, model, share, begin, seconds, seed * CLIENTS + number) for number, share in enumerate(shares)
    ]
    found = pool.starmap_async(_clients, jobs, chunksize=1).get(seconds + TIMEOUT_S + SLACK_S)
    return figures_of([reply for replies in found for reply in replies], begin + seconds / 4, begin + seconds)


def _clients(port: int, model: str, clients: int, begin: float, seconds: float, seed: int) -> list[Seen]:
    with no_pauses():
        return asyncio.run(_loops(port, model, clients, begin, begin + seconds, seed))


async def _loops(port: int, model: str, clients: int, begin: float, end: float, seed: int) -> list[Seen]:
    client, draw, replies = Client(port), random.Random(seed), list[Reply]()

    async def loop() -> None:
        await asyncio.sleep(max(0.0, begin - time.perf_counter()))
        while time.perf_counter() < end:
            asked = time.perf_counter()
            try:
                reply = await client.post("/v1/completions", body(draw, PROMPT, ANSWER, model=model))
            except OSError:  # includes TimeoutError
                reply = Reply(asked)
            replies.append(reply)
            if not reply.whole or reply.status != 200:
                await asyncio.sleep(0.2)  # do not flood a server that refuses

    try:
        await asyncio.gather(*(loop() for _ in range(clients)))
    finally:
        await client.close()
    return [(one.asked, one.done, one.whole and one.status == 200, one.arrivals) for one in replies]


def figures_of(replies: list[Seen], first: float, last: float) -> Figures:
    """Return the figures between two moments: tokens/s, and ms of the requests that were sent then.

    An event carries one token or, where several were ready, more. Raises RuntimeError if no answer was whole.
    """
    whole = [(asked, arrivals) for asked, _, good, arrivals in replies if good and arrivals]
    if not whole:
        raise RuntimeError(f"none of {len(replies)} answers was whole")
    tokens = sum(ANSWER * sum(first <= at < last for at in arrivals) / len(arrivals) for _, arrivals in whole)
    counted = [(asked, arrivals) for asked, arrivals in whole if asked >= first] or whole
    waits = [1e3 * (arrivals[0] - asked) for asked, arrivals in counted]
    gaps = [1e3 * (after - before) for _, arrivals in counted for before, after in pairwise(arrivals)]
    return {
        "tokens_per_s": round(tokens / (last - first), 1),
        "ttft_p50_ms": round(percentile(waits, 0.5), 2),
        "ttft_p99_ms": round(percentile(waits, 0.99), 2),
        "itl_p50_ms": round(percentile(gaps, 0.5), 2),
        "itl_p99_ms": round(percentile(gaps, 0.99), 2),
        "itl_max_ms": round(max(gaps, default=float("nan")), 2),
        "answers": len(counted),
        "failed": len(replies) - len(whole),
    }
