"""Measure a prompt larger than staging: 256 MiB of KV through 64 MiB, against staging that holds it all.

    python -m bench window [--rounds 7]

No engine runs: two processes with caches of the 80 M model's shapes. `whole`: the prompt is complete, and its
KV is pulled. `early`: it is computed in steps of `STEP_TOKENS`, one every `STEP_S`, and pulled meanwhile; the
rest of the handoff then counts, from the begin of the last step's save. Staging large and small take turns.
Each round compares the digests of all blocks, and one difference ends the run without figures.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from baton.handoff import transports, windows
from baton.handoff.channels import HandoffClient
from baton.handoff.groups import CacheGroup, Part, described
from baton.handoff.load.job import LoadJob
from baton.handoff.load.loader import Loader
from baton.handoff.manifest import Puller, seal
from baton.handoff.memory.arena import Arena
from baton.handoff.memory.host import HostBlockCache
from baton.handoff.records import Digests
from baton.handoff.reports import ShardSave
from baton.handoff.save.saver import SaveJob, Saver
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Transport
from baton.kernels.kv_pack import AS_IS
from baton.protos.handoff_pb2 import Manifest, Shard
from bench.handoff import HASH, MIB, Shape
from harness.stats import compared, median, save

PROMPT_MIB = 256
STAGING_MIB = {"large": 576, "small": 64}  # the large one holds two such prompts
STEP_TOKENS, STEP_S = 512, 0.1
SHAPE = Shape(12, 4, 64, 32, 0, 0, 4, AS_IS)
RECORD = SHAPE.layers * SHAPE.heads * SHAPE.block_size * 2 * SHAPE.head_dim * 2  # bytes
BLOCKS = PROMPT_MIB * MIB // RECORD
TOKENS = BLOCKS * SHAPE.block_size
FULL = Shape(12, 4, 64, 32, BLOCKS + 1, TOKENS, 4, AS_IS)
ALL = tuple(range(1, BLOCKS + 1))
GROUPS = (CacheGroup(SHAPE.block_size),)


@dataclass(frozen=True)
class Ended:
    """The end of a prompt, as the prefill worker's side knows it."""

    save: ShardSave
    began_s: float  # the last step's save; CLOCK_MONOTONIC
    steps_ms: list[float]  # that the engine's thread spent in saves


def own_digests(cache: HostBlockCache) -> Digests:
    """Return the digests of all blocks."""
    return cache.gather(0, ALL, np.empty((BLOCKS, cache.record_bytes), np.uint8))


def source(connection: Connection) -> None:
    """Run the prefill worker's side in a process of its own."""
    cache = FULL.cache(FULL.tensors(1), AS_IS)
    offering = transports.create(["shm", "tcp"])
    savers, slots = {}, {}
    with ExitStack() as stack:
        for name, mib in STAGING_MIB.items():
            staging = stack.enter_context(closing(Staging(Arena(mib * MIB, cache.record_bytes), 60)))
            service = stack.enter_context(closing(HandoffService(staging, 0, "127.0.0.1:0", 4 * MIB)))
            saver = Saver(cache, staging, offering, rank=0, address=service.address, chunk_bytes=4 * MIB)
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
        raise SystemExit("the last part of a save says nothing")
    connection.send(Ended(saved, began, times))


class Bench:
    """The decode worker's side."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._expected: Digests = connection.recv()
        self._tensors = FULL.tensors(2)
        self._cache = FULL.cache(self._tensors, AS_IS)
        self._count = 0

    def loader(self, transport: Transport, client: HandoffClient) -> Loader:
        """Return a loader with this transport alone."""
        form = Puller("bench", 0, HASH, GROUPS, self._cache.layers, self._cache.form)
        return Loader(self._cache, form, [transport], client, pull_timeout_s=60, chunk_bytes=4 * MIB)

    def round(self, loader: Loader, staging: str, early: bool) -> dict[str, float]:
        """Do one handoff and check it."""
        for tensor in self._tensors.values():
            tensor.zero_()
        self._count += 1
        name = f"bench-{self._count}"
        blocks = STEP_TOKENS // SHAPE.block_size if early else BLOCKS
        self._connection.send((staging, name, blocks))
        if early:
            manifest = self._submit(loader, name, self._connection.recv(), early)
        ended: Ended = self._connection.recv()
        if early:
            loader.complete((name, 1), manifest)
        else:
            self._submit(loader, name, ended.save, early)
        while not (done := loader.take_finished()):
            time.sleep(0.0001)
        now = time.monotonic()
        if done[0].problem is not None:
            raise SystemExit(f"load failed: {done[0].problem}")
        if not np.array_equal(own_digests(self._cache), self._expected):
            raise SystemExit("the bytes that came are not the bytes that were saved: no figures")
        return {
            "total_ms": (now - ended.began_s) * 1e3,
            "step_ms": median(ended.steps_ms),
            "early": done[0].early_bytes / done[0].bytes,
        }

    def _submit(self, loader: Loader, name: str, saved: ShardSave, early: bool) -> Manifest:
        manifest = Manifest(
            request_id=name,
            epoch=1,
            compatibility_hash=HASH,
            num_tokens=TOKENS,
            num_blocks=BLOCKS,
            groups=described(GROUPS, TOKENS),
            shards=[Shard.FromString(saved.shard)],
            wire_dtype=AS_IS,
        )
        parts, now = (Part(0, 0, ALL),), time.monotonic()
        loader.reserve(LoadJob(name, 1, TOKENS, parts, now, manifest=seal(manifest), complete=not early))
        return manifest


def main(arguments: list[str]) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench window",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args(arguments).rounds
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=source, args=(theirs,), daemon=True)
    process.start()
    bench = Bench(connection)
    found: dict[str, Any] = {}
    with closing(HandoffClient()) as client:
        for transport, early in itertools.product(transports.create(["shm", "tcp"]), (False, True)):
            with closing(bench.loader(transport, client)) as loader:
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
    connection.send(None)
    process.join(timeout=10)
    how = {"prompt_mib": PROMPT_MIB, "tokens": TOKENS, "step_tokens": STEP_TOKENS, "step_s": STEP_S}
    save("window", {**how, "staging_mib": STAGING_MIB, "rounds": rounds, "ways": found})
