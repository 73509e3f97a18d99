"""Measure placements of chats' turns by prefix caches, in prompts of 100,000 tokens.

    python -m bench prefixes [--workers 10 100 1000 3000]

The times include the router's hashing, its call over gRPC, the scheduler's choice and its booking; router and
scheduler share one process and core. Workers report the blocks of earlier turns. If too few prompts are found
in caches, the run fails.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import uvloop

from baton.prefix_keys import PromptKeys
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.service import SchedulerServer
from baton.services.config import SchedulerSettings
from baton.services.imports import collect_seldom
from bench.options import options
from harness.scheduling import identity
from harness.scheduling import place as place_need
from harness.stats import percentile, save

BLOCK = 16  # tokens
HASHING = pb.BlockHashing(tokens=BLOCK, algorithm="sha256", root=bytes(32), every=1)
CAPACITY: dict[str, Any] = {"num_blocks": 10**6, "max_num_seqs": 10**4, "max_model_len": 10**6}
PROMPT = 100_000  # tokens
CHATS = 32
TURNS = 24
TURN = 500  # tokens


def main(arguments: list[str]) -> None:
    given = options(__doc__, arguments, workers=[10, 100, 1_000, 3_000])
    collect_seldom()  # as the product's processes do
    result: dict[str, Any] = {"block_tokens": BLOCK, "prompt_tokens": PROMPT}
    result["turns"] = {str(many): _shown(uvloop.run(turns(many)), many) for many in given.workers}
    save("prefixes", result)


def _shown(figures: dict[str, float], workers: int) -> dict[str, float]:
    shown = ", ".join(f"{key} {value:,g}" for key, value in figures.items())
    print(f"{workers} workers: {shown}", flush=True)
    return figures


async def turns(workers: int) -> dict[str, float]:
    """Place the turns of CHATS chats in a scheduler with `workers` workers."""
    from baton.services.router.vllm.block_hashes import PromptHasher

    hasher = PromptHasher(HASHING)
    draw = random.Random(5)
    chats = [list(array("H", draw.randbytes(2 * (PROMPT - TURNS * TURN)))) for _ in range(CHATS)]
    limits = {"worker_lease_s": 600, "max_queued_prompt_tokens": 10**9}
    settings = SchedulerSettings(address="127.0.0.1:0", store="memory", **limits)
    told: Counter[str] = Counter()  # operations of each worker
    untold: list[tuple[str, PromptKeys]] = []  # blocks since the last turn, not reported yet

    async with (
        SchedulerServer(settings) as server,
        SchedulerClient(server.address, router_id="bench") as client,
    ):

        async def place(chat: int, turn: int) -> float:
            tokens = chats[chat]
            tokens += array("H", draw.randbytes(2 * TURN))
            began = time.perf_counter()
            keys = hasher.keys(_request(tokens))
            placed = await place_need(client, f"{chat}.{turn}", 1, len(tokens), 200, prefix=keys)
            took = time.perf_counter() - began
            client.reports.prefilled(placed.attempt)
            client.reports.finished(placed.attempt, "stop")
            untold.extend((one.worker_id, keys) for one in (placed.prefill, placed.decode) if one)
            return took

        async def tell() -> None:
            for worker_id, (keys, _) in untold:
                await _beat(client, worker_id, told[worker_id], keys)
                told[worker_id] += len(keys)
            untold.clear()

        for number in range(workers):
            role = pb.ROLE_PREFILL if number % 2 else pb.ROLE_DECODE
            own = identity(f"w{number}", role, **CAPACITY, hashing=HASHING)
            await client.register(own, pb.WORKER_STATE_READY)
            await _beat(client, own.worker_id, 0, ())
        alone, many, cpu_s = [], 0, 0.0
        for turn in range(TURNS):
            began = time.process_time()
            if turn % 2:
                many += len(await asyncio.gather(*(place(chat, turn) for chat in range(CHATS))))
                cpu_s += time.process_time() - began
            else:
                took = [await place(chat, turn) for chat in range(CHATS)]
                alone += took if turn else []  # the first turn hashes everything
            await tell()
        some = server.metrics.registry.get_sample_value(
            "baton_scheduler_prefix_placements_total", {"holds": "some"}
        )
    if not some or some < 0.9 * CHATS * (TURNS - 1):
        raise SystemExit(f"{some} prompts were found: the figures would mean nothing")
    return {
        "place_p50_ms": round(1_000 * percentile(alone, 0.5), 2),
        "place_p99_ms": round(1_000 * percentile(alone, 0.99), 2),
        "requests_a_core_s": round(many / cpu_s),
    }


async def _beat(client: SchedulerClient, worker_id: str, first: int, operations: Sequence[int]) -> None:
    blocks = pb.BlockOperations(instance=1, first=first, operations=operations)
    await client.heartbeat(worker_id, pb.WORKER_STATE_READY, pb.WorkerLoad(), blocks=blocks)


def _request(tokens: list[int]) -> Any:
    """Return a request with the fields that the router's hasher reads."""
    return SimpleNamespace(
        prompt_token_ids=tokens, mm_features=None, lora_request=None, cache_salt="tenant", prompt_embeds=None
    )
