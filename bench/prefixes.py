"""Measure placements by prefix caches: look-ups, decisions, and whole turns of chats.

    python -m bench prefixes [--workers 10 100 1000 3000] [--blocks 2000000]

Workers hold the blocks of long chats, each of which begins with one of a few system prompts. Decisions place
those chats' next turns, prompts of 100,000 tokens, in this process without gRPC. A look-up that misses a
stored block fails the run. `turns` measures whole placements of chat turns: the router's hashing, its call
over real gRPC and the booking, with router and scheduler sharing one process and core.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import uvloop

from baton.block_log import PIECE
from baton.prefix_keys import PromptKeys, key_of, prompt_keys
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.policy import Policy
from baton.scheduler.prefixes.index import PrefixIndex
from baton.scheduler.prefixes.match import Match
from baton.scheduler.prefixes.prefix_ledger import PrefixLedger
from baton.scheduler.service import SchedulerServer
from baton.scheduler.types import FleetView, Reserved, WorkerRecord
from baton.services.config import SchedulerSettings
from baton.services.imports import collect_seldom
from bench.options import options
from harness.scheduling import need
from harness.scheduling import place as place_need
from harness.stats import percentile, save

BLOCK = 16  # tokens
PROMPT = 100_000  # tokens
SYSTEM = 128  # blocks of a system prompt
SYSTEMS = 16
DECISIONS = 2_000
CHATS = 32
TURNS = 24
TURN = 500  # tokens


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        workers=[10, 100, 1_000, 3_000],
        blocks=(2_000_000, "on all workers together"),
    )
    collect_seldom()  # the product's processes do, too
    result: dict[str, Any] = {"block_tokens": BLOCK, "prompt_tokens": PROMPT}
    result["index"] = {str(many): _shown(index(many, given.blocks), many) for many in given.workers}
    result["turns"] = {str(many): _shown(uvloop.run(turns(many)), many) for many in given.workers}
    save("prefixes", result)


def _shown(figures: dict[str, float], workers: int) -> dict[str, float]:
    shown = ", ".join(f"{key} {value:,g}" for key, value in figures.items())
    print(f"{workers} workers: {shown}", flush=True)
    return figures


def index(workers: int, blocks: int) -> dict[str, float]:
    """Fill an index with the blocks of `workers` workers and place prompts with it."""
    ledger, view, chats = filled(workers, blocks)
    figures = {"blocks": len(ledger.index), **_deciding(ledger, view, chats)}
    gone = next(iter(view.workers))
    began = time.perf_counter()
    ledger.keep({key: one.role for key, one in view.workers.items() if key != gone})
    figures["worker_gone_ms"] = round(1_000 * (time.perf_counter() - began), 3)
    return figures


def filled(workers: int, blocks: int) -> tuple[PrefixLedger, FleetView, list[tuple[str, list[int]]]]:
    """Return a ledger of workers that hold these blocks, their view, and chats (worker, hashes)."""
    draw = random.Random(1)
    ledger = PrefixLedger(PrefixIndex(10 * blocks))
    records = {name: record(name, number) for number in range(workers) for name in (f"w{number}",)}
    systems = [[draw.getrandbits(64) for _ in range(SYSTEM)] for _ in range(SYSTEMS)]
    length = max(SYSTEM + 1, min(PROMPT // BLOCK, blocks // workers))
    chats: list[tuple[str, list[int]]] = []
    sent = dict.fromkeys(records, 0)
    names = list(records)
    for number in range(max(workers, blocks // length)):
        name = names[number % workers]
        hashes = draw.choice(systems) + [draw.getrandbits(64) for _ in range(length - SYSTEM)]
        keys = [key_of(one, depth) for depth, one in enumerate(hashes, start=1)]
        for begin in range(0, len(keys), PIECE):
            piece = keys[begin : begin + PIECE]
            ledger.hear(name, pb.BlockOperations(instance=1, first=sent[name], operations=piece))
            sent[name] += len(piece)
        if len(chats) < DECISIONS:
            chats.append((name, hashes))
    ledger.keep({key: one.role for key, one in records.items()})
    return ledger, FleetView(records), chats


def _deciding(
    ledger: PrefixLedger, view: FleetView, chats: Sequence[tuple[str, list[int]]]
) -> dict[str, float]:
    draw = random.Random(2)
    settings = SchedulerSettings(max_queued_prompt_tokens=10**9)
    policy = Policy(settings, settings.policy, random.Random(3))
    prompts: list[tuple[str, PromptKeys]] = []
    for name, hashes in chats:
        more = [draw.getrandbits(64) for _ in range(PROMPT // BLOCK - len(hashes))]
        prompts.append((name, prompt_keys(hashes + more, BLOCK)))
    took, found = [], 0
    for number in range(DECISIONS):
        name, prompt = prompts[number % len(prompts)]
        began = time.perf_counter()
        match = Match(ledger, prompt, PROMPT)
        policy.choose(view, need(f"r{number}", 1, PROMPT, 200, prefix=prompt, match=match))
        took.append(time.perf_counter() - began)
        found += match.tokens(name) > 0
    if found < DECISIONS:
        raise SystemExit(f"{DECISIONS - found} prompts were not found: the figures would mean nothing")
    alone = _fastest(lambda: [Match(ledger, one, PROMPT).tokens(name) for name, one in prompts[:100]]) / 100
    return {
        "decision_p50_us": round(1e6 * percentile(took, 0.5), 1),
        "decision_p99_us": round(1e6 * percentile(took, 0.99), 1),
        "decisions_a_s": round(len(took) / sum(took)),
        "look_ups_a_s": round(1 / alone),
    }


async def turns(workers: int) -> dict[str, float]:
    """Place the turns of CHATS chats in a scheduler with `workers` workers."""
    from baton.services.router.vllm.block_hashes import PromptHasher

    hasher = PromptHasher(pb.BlockHashing(tokens=BLOCK, algorithm="sha256", root=bytes(32), every=1))
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
            client.reporter.prefilled(placed.attempt)
            client.reporter.finished(placed.attempt, "stop")
            untold.extend((one.worker_id, keys) for one in (placed.prefill, placed.decode) if one)
            return took

        async def tell() -> None:
            for worker_id, (keys, _) in untold:
                await _beat(client, worker_id, told[worker_id], keys)
                told[worker_id] += len(keys)
            untold.clear()

        for number in range(workers):
            identity = record(f"w{number}", number).identity
            await client.register(identity, pb.WORKER_STATE_READY)
            await _beat(client, identity.worker_id, 0, ())
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


def record(name: str, number: int) -> WorkerRecord:
    """Return a scheduler's record of a worker."""
    role = pb.ROLE_PREFILL if number % 2 else pb.ROLE_DECODE
    capacity = pb.Capacity(
        compatibility_hash="ab" * 32,
        block_size=BLOCK,
        num_blocks=10**6,
        max_num_seqs=10**4,
        max_model_len=10**6,
        lookahead_tokens=4,
        transports=["shm", "tcp"],
        facts=dict.fromkeys(("vllm", "model", "dtype", "layers", "attention"), "a value of some length"),
        hashing=pb.BlockHashing(tokens=BLOCK, algorithm="sha256", root=bytes(32), every=1),
    )
    identity = pb.WorkerIdentity(
        worker_id=f"{name}.12345",
        role=role,
        address="10.0.0.1:7500",
        host="0123456789abcdef",
        model="bench",
        model_fingerprint="cd" * 32,
        vllm_version="0.32.0",
        capacity=capacity,
        metrics_address="10.0.0.1:9500",
    )
    return WorkerRecord(identity, pb.WORKER_STATE_READY, pb.WorkerLoad(), Reserved(), False, 5.0)


def _fastest(run: Callable[[], object], times: int = 5) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)
