"""Measure a prompt larger than staging: 256 MiB of KV through 64 MiB, against staging that holds it all.

    python -m bench window [--rounds 7]

No engine runs: two processes have caches of the 80 M model's shapes. `whole` pulls the KV of a complete
prompt. `early` pulls while the prompt is computed in steps of `STEP_TOKENS`, one every `STEP_S`; its figure
is the rest of the handoff, from the start of the last step's save. Large and small staging alternate. Each
round compares the digests of all blocks, and one difference ends the run without figures.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from baton.handoff import transports, windows
from baton.handoff.channels import HandoffClient
from baton.handoff.groups import Part
from baton.handoff.load.loader import Loader
from baton.handoff.memory.arena import Arena
from baton.handoff.memory.cache import HostBlockCache
from baton.handoff.records import Digests
from baton.handoff.reports import ShardSave
from baton.handoff.save.saver import SaveJob, Saver
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.kernels.kv_pack import AS_IS
from bench.handoff import (
    BLOCK,
    CHUNK,
    HEAD_DIM,
    HEADS,
    LAYERS,
    MIB,
    cache_of,
    finished,
    loader_of,
    source,
    submit,
    tensors_of,
)
from bench.options import options
from harness.stats import compared, median, save

PROMPT_MIB = 256
STAGING_MIB = {"large": 576, "small": 64}  # the large one holds two such prompts
STEP_TOKENS, STEP_S = 512, 0.1
RECORD = LAYERS * HEADS * BLOCK * 2 * HEAD_DIM * 2  # bytes
BLOCKS = PROMPT_MIB * MIB // RECORD
TOKENS = BLOCKS * BLOCK
ALL = tuple(range(1, BLOCKS + 1))


@dataclass(frozen=True)
class Ended:
    """The end of a prompt on the prefill worker's side."""

    save: ShardSave
    began_s: float  # start of the last step's save; CLOCK_MONOTONIC
    steps_ms: list[float]  # the engine thread's time in each save


def own_digests(cache: HostBlockCache) -> Digests:
    return cache.gather(0, ALL, np.empty((BLOCKS, cache.record_bytes), np.uint8))


def serve_steps(connection: Connection) -> None:
    """Play the prefill worker: save prompts step by step, through the requested staging."""
    cache = cache_of(tensors_of(BLOCKS + 1, 1), AS_IS)
    offering = transports.create(["shm", "tcp"])
    savers, slots = {}, {}
    with ExitStack() as stack:
        for name, mib in STAGING_MIB.items():
            staging = stack.enter_context(closing(Staging(Arena(mib * MIB, cache.record_bytes), 60)))
            service = stack.enter_context(closing(HandoffService(staging, 0, "127.0.0.1:0", CHUNK)))
            saver = Saver(cache, staging, offering, rank=0, address=service.address, chunk_bytes=CHUNK)
            savers[name] = stack.enter_context(closing(saver))
            slots[name] = windows.slots_for(BLOCKS, staging.capacity)
        connection.send(own_digests(cache))
        while (asked := connection.recv()) is not None:
            name, request_id, step_blocks = asked
            _prompt(connection, savers[name], slots[name], request_id, step_blocks)


def _prompt(connection: Connection, saver: Saver, slots: int, request_id: str, step_blocks: int) -> None:
    times, began, saved = [], 0.0, None
    due = time.monotonic()
    for first in range(0, BLOCKS, step_blocks):
        stop = min(BLOCKS, first + step_blocks)
        if step_blocks < BLOCKS:
            time.sleep(max(0.0, due - time.monotonic()))
            due += STEP_S
        began = time.monotonic()
        parts = (Part(0, first, ALL[first:stop]),)
        saved = saver.save(SaveJob(request_id, 1, parts, BLOCKS, last=stop == BLOCKS, slots=slots))
        times.append((time.monotonic() - began) * 1e3)
        if saved is not None and saved.problem is not None:
            raise SystemExit(f"save failed: {saved.problem}")
        if saved is not None and saved.begun:
            connection.send(saved)
    if saved is None:
        raise SystemExit("the last part of a save returned nothing")
    connection.send(Ended(saved, began, times))


class Bench:
    """The decode worker's side."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._expected: Digests = connection.recv()
        self._tensors = tensors_of(BLOCKS + 1, 2)
        self.cache = cache_of(self._tensors, AS_IS)
        self._count = 0

    def round(self, loader: Loader, staging: str, early: bool) -> dict[str, float]:
        """Hand over once and check the digests."""
        for tensor in self._tensors.values():
            tensor.zero_()
        self._count += 1
        name = f"bench-{self._count}"
        self._connection.send((staging, name, STEP_TOKENS // BLOCK if early else BLOCKS))
        if early:
            begun = self._connection.recv()
            manifest = submit(loader, name, begun, ALL, TOKENS, AS_IS, complete=False)
        ended: Ended = self._connection.recv()
        if early:
            loader.complete((name, 1), manifest)
        else:
            submit(loader, name, ended.save, ALL, TOKENS, AS_IS, complete=True)
        done, now = finished(loader), time.monotonic()
        if not np.array_equal(own_digests(self.cache), self._expected):
            raise SystemExit("the pulled bytes differ from the saved bytes: no figures")
        return {
            "total_ms": (now - ended.began_s) * 1e3,
            "step_ms": median(ended.steps_ms),
            "early": done.early_bytes / done.bytes,
        }


def main(arguments: list[str]) -> None:
    rounds = options(__doc__, arguments, rounds=7).rounds
    found: dict[str, Any] = {}
    with source(serve_steps) as connection, closing(HandoffClient()) as client:
        bench = Bench(connection)
        for transport, early in itertools.product(transports.create(["shm", "tcp"]), (False, True)):
            with closing(loader_of(bench.cache, [transport], client)) as loader:
                runs: dict[str, list[dict[str, float]]] = {name: [] for name in STAGING_MIB}
                for _ in range(rounds + 1):  # the first one connects and maps
                    for name, results in runs.items():
                        results.append(bench.round(loader, name, early))
            what = f"{transport.name}, {'early' if early else 'whole'}"
            found[what] = {
                key: compared({name: [one[key] for one in results[1:]] for name, results in runs.items()})
                for key in ("total_ms", "step_ms")
            }
            for name, results in runs.items():
                found[what][f"early_{name}"] = round(median([one["early"] for one in results[1:]]), 3)
            print(what, found[what], flush=True)
    how = {"prompt_mib": PROMPT_MIB, "tokens": TOKENS, "step_tokens": STEP_TOKENS, "step_s": STEP_S}
    save("window", {**how, "staging_mib": STAGING_MIB, "rounds": rounds, "ways": found})
