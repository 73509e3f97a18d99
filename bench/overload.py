"""Send five times as many requests as a deployment can serve; measure admitted and refused requests.

1P1D of the demo model runs on two cores, without speculation, so that an event is a token. Capacity is the
rate of four closed-loop streams, one for each slot of the decode worker (max_num_seqs 4). Then requests
arrive at random times at five times that rate. They wait in the router for at most ten seconds; a request
that would wait longer is refused. Before and after, one stream runs alone, and then four. The gap to the
second token includes the handoff and counts like any other.

The load generator shares the cores and runs at nice 10.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from functools import partial
from typing import Any

from bench.light import Client, body, closed, latencies, opened
from bench.options import options
from bench.served import no_pauses, up
from harness.deployment import ENGINE, MODEL, MODEL_NAME, Deployment, free_blocks, idle
from harness.stats import percentile, save
from harness.support import eventually

SLOTS = 4
PROMPT_TOKENS, ANSWER_TOKENS = 32, 64
WAIT_S = 10.0
GOAL = 1.5  # ITL p99 under overload, relative to one stream alone
SETTLE_S = 30.0


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        seconds=(120.0, "of overload"),
        calm=(15.0, "seconds of each measurement without it"),
        times=(5.0, "capacity"),
    )
    engine = {**ENGINE, "model": str(MODEL), "speculative_config": None, "max_num_seqs": SLOTS}
    with up(engine=engine, router={"request_timeout_s": 2 * WAIT_S}) as one, no_pauses():
        os.nice(10)  # this process alone: the deployment has started
        result = asyncio.run(measure(one, given.seconds, given.calm, given.times))
    save("overload", result)
    for name in ("alone", "full", "overload", "after", "goals"):
        print(f"{name:>9}", result[name], flush=True)


async def measure(one: Deployment, seconds: float, calm_s: float, times: float) -> dict[str, Any]:
    """Return the figures before, during and after overload."""
    client, draw = Client(one.port), random.Random(1)
    make = partial(body, draw, PROMPT_TOKENS, ANSWER_TOKENS, model=MODEL_NAME, vocabulary=(300, 4_000))
    await closed(client, make, SLOTS, min(5.0, calm_s))  # warm
    eventually(lambda: idle(one), SETTLE_S, "nothing runs")
    blocks = free_blocks(one)
    alone = latencies(await closed(client, make, 1, calm_s))
    full = latencies(replies := await closed(client, make, SLOTS, calm_s))
    capacity = len(replies) / calm_s
    under = await opened(client, make, times * capacity, seconds, draw)
    eventually(lambda: idle(one), SETTLE_S, "nothing runs")
    missing = sum(blocks.values()) - sum(free_blocks(one).values())
    after = {
        "alone": latencies(await closed(client, make, 1, calm_s)),
        "full": latencies(await closed(client, make, SLOTS, calm_s)),
        "blocks_missing": missing,
    }
    await client.close()
    admitted = [reply for reply in under if reply.status == 200]
    refused = [reply for reply in under if reply.status == 503]
    took = [1e3 * reply.took for reply in refused]
    overload: dict[str, Any] = {
        **latencies(admitted),
        "offered_per_s": round(times * capacity, 1),
        "admitted_share": round(len(admitted) / len(under), 3),
        "admitted_per_s": round(len(admitted) / seconds, 1),
        "refused": len(refused),
        "refused_p50_ms": round(percentile(took, 0.5), 2),
        "refused_p99_ms": round(percentile(took, 0.99), 2),
        "without_retry_after": sum(b"retry-after" not in reply.headers for reply in refused),
        "other": dict(Counter(str(reply.status) for reply in under if reply.status not in (200, 503))),
        "broken": sum(not reply.whole for reply in admitted),
    }
    return {
        "load": {
            "slots": SLOTS,
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": ANSWER_TOKENS,
            "wait_s": WAIT_S,
            "times": times,
            "seconds": seconds,
            "capacity_per_s": round(capacity, 2),
        },
        "alone": alone,
        "full": full,
        "overload": overload,
        "after": after,
        "goals": {
            "itl_p99_against_alone": round(overload["itl_p99_ms"] / alone["itl_p99_ms"], 2),
            "itl_p99_against_full": round(overload["itl_p99_ms"] / full["itl_p99_ms"], 2),
            "goal": GOAL,
        },
    }
