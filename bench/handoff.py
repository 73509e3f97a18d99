"""Measure a handoff by transport: a prompt's KV moves from one process's cache to another's, without engines.

    python -m bench handoff [--tokens 100 900 3600] [--rounds 40] [--formats auto int8]

Both processes have caches of the 80 M model's shapes with random numbers in random blocks. A round saves
(gather, digest, publish), pulls (move, digest, scatter) and compares every byte; one difference ends the run
without figures. On one machine NIXL copies from the other process's memory; "nixl, TCP" is what it does
between hosts without RDMA. Transports alternate every ten rounds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch

from baton.handoff import transports
from baton.handoff.channels import HandoffClient
from baton.handoff.groups import CacheGroup, Part, described, num_blocks
from baton.handoff.load.loader import Loader
from baton.handoff.load.pull import LoadJob
from baton.handoff.manifest import Puller, seal
from baton.handoff.memory.arena import Arena
from baton.handoff.memory.blocks import block_cache
from baton.handoff.memory.cache import HostBlockCache
from baton.handoff.reports import ShardLoad, ShardSave
from baton.handoff.save.saver import SaveJob, Saver
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.kernels.kv_pack import AS_IS, WIRE_DTYPES
from baton.protos.handoff_pb2 import Manifest, Shard
from bench.options import options
from harness.stats import save

MIB = 1 << 20
CHUNK = 4 * MIB
HASH = "bench"
LAYERS, HEADS, HEAD_DIM, BLOCK = 12, 4, 64, 32
GROUPS = (CacheGroup(BLOCK),)
TURN = 10  # rounds
ARMS: dict[str, tuple[str, dict[str, str]]] = {  # transport and environment
    "shm": ("shm", {}),
    "nixl": ("nixl", {}),
    "nixl, TCP": ("nixl", {"UCX_TLS": "tcp,self"}),
    "tcp": ("tcp", {}),
}


def tensors_of(blocks: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a cache's layers of random bfloat16 numbers."""
    generator, shape = torch.Generator().manual_seed(seed), (blocks, HEADS, BLOCK, 2 * HEAD_DIM)
    return {f"layers.{i}": torch.randn(shape, generator=generator).bfloat16() for i in range(LAYERS)}


def cache_of(tensors: dict[str, torch.Tensor], wire: str) -> HostBlockCache:
    blocks = len(next(iter(tensors.values())))
    made = block_cache(tensors, blocks, wire, dict.fromkeys(tensors, HEAD_DIM))
    assert isinstance(made, HostBlockCache)  # noqa: S101 (for mypy)
    return made


@contextmanager
def source(blocks: int, wire: str) -> Iterator[Connection]:
    """Run `serve_saves` in another process during the block."""
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=serve_saves, args=(theirs, blocks, wire), daemon=True)
    process.start()
    try:
        yield connection
    finally:
        connection.send(None)
        process.join(timeout=10)


def serve_saves(connection: Connection, blocks: int, wire: str) -> None:
    """Play the prefill worker: save on request, until None is received."""
    cache = cache_of(tensors_of(blocks, 1), wire)
    offering = transports.create(transports.possible())
    pin, withdraw = partial(transports.register, offering), partial(transports.withdraw, offering)
    staging = Staging(Arena(512 * MIB, cache.record_bytes, pin=pin), 60, withdraw)
    service = HandoffService(staging, 0, "127.0.0.1:0", CHUNK)
    saver = Saver(cache, staging, offering, rank=0, address=service.address, chunk_bytes=CHUNK)
    connection.send(None)
    while (asked := connection.recv()) is not None:
        request_id, block_ids = asked
        saved = saver.save(SaveJob(request_id, 1, (Part(0, 0, block_ids),)))
        expected = np.empty((len(block_ids), cache.record_bytes), np.uint8)
        cache.gather(0, block_ids, expected)
        connection.send((saved, expected))
    service.close()
    staging.close()
    for transport in offering:
        transport.close()


class Bench:
    """The decode worker's side, with one transport and its own source."""

    def __init__(self, connection: Connection, tokens: int, wire: str, transport: str) -> None:
        self._connection, self._tokens, self._wire = connection, tokens, wire
        self._pulling, self._client = transports.create([transport]), HandoffClient()
        connection.recv()
        self._blocks = num_blocks(tokens, BLOCK)
        tensors = tensors_of(8 * self._blocks + 1, 2)
        self._cache = cache_of(tensors, wire)
        self._plain = cache_of(tensors, AS_IS)  # to compare bytes
        puller = Puller("bench", 0, HASH, GROUPS, self._cache.layers, self._cache.form)
        self._loader = Loader(
            self._cache, puller, self._pulling, self._client, pull_timeout_s=60, chunk_bytes=CHUNK
        )
        self._random = np.random.default_rng(0)
        self._count = 0
        self.results: list[tuple[ShardSave, ShardLoad, float]] = []

    def round(self) -> tuple[ShardSave, ShardLoad, float]:
        """Hand over once. Return the save, the load, and the pull's wall time in ms."""
        self._count += 1
        name = f"bench-{self._count}"
        theirs, both = self._ids(1), self._ids(2)
        ours, mirror = both[: self._blocks], both[self._blocks :]
        self._connection.send((name, theirs))
        saved, expected = self._connection.recv()
        if saved.problem is not None:
            raise SystemExit(f"save failed: {saved.problem}")
        start = time.monotonic()
        done = self._pulled(name, saved, ours)
        wall_ms = (time.monotonic() - start) * 1e3
        self._cache.scatter(0, expected, mirror)
        found, right = (np.empty((len(ours), self._plain.record_bytes), np.uint8) for _ in range(2))
        self._plain.gather(0, ours, found)
        self._plain.gather(0, mirror, right)
        if not np.array_equal(found, right):
            raise SystemExit("the pulled bytes differ from the saved bytes: no figures")
        return saved, done, wall_ms

    def _pulled(self, name: str, saved: ShardSave, ids: tuple[int, ...]) -> ShardLoad:
        """Pull a save into these blocks. Raises SystemExit if that fails."""
        manifest = Manifest(
            request_id=name,
            epoch=1,
            compatibility_hash=HASH,
            num_tokens=self._tokens,
            num_blocks=len(ids),
            groups=described(GROUPS, self._tokens),
            shards=[Shard.FromString(saved.shard)],
            wire_dtype=self._wire,
        )
        seal(manifest)
        parts = (Part(0, 0, ids),)
        self._loader.reserve(LoadJob(name, 1, self._tokens, parts, manifest=manifest, complete=True))
        while not (done := self._loader.take_finished()):
            time.sleep(0.0001)
        if done[0].problem is not None:
            raise SystemExit(f"load failed: {done[0].problem}")
        return done[0]

    def _ids(self, times: int) -> tuple[int, ...]:
        blocks = self._random.permutation(np.arange(1, 8 * self._blocks + 1))
        return tuple(blocks[: times * self._blocks].tolist())

    def close(self) -> None:
        self._loader.close()
        for transport in self._pulling:
            transport.close()
        self._client.close()

    def summary(self) -> dict[str, float | str]:
        results = self.results
        parts = {
            "save": [saved.save_ms for saved, _, _ in results],
            **{
                stage: [getattr(load.costs, f"{stage}_ms") for _, load, _ in results]
                for stage in ("wait", "move", "check", "load")
            },
            "pull": [wall for _, _, wall in results],
            "total": [saved.save_ms + wall for saved, _, wall in results],
        }
        p95 = sorted(parts["total"])[int(0.95 * len(results))]
        return {
            "MB": round(results[0][1].bytes / 1e6, 1),
            **{f"{name}_ms": round(statistics.median(values), 2) for name, values in parts.items()},
            "total_p95_ms": round(p95, 2),
        }


def main(arguments: list[str]) -> None:
    given = options(
        __doc__,
        arguments,
        tokens=([100, 900, 3600], "of the prompt"),
        rounds=40,
        transports=(list(ARMS), None, ARMS),
        formats=(list(WIRE_DTYPES), None, WIRE_DTYPES),
    )
    results: dict[int, dict[str, dict[str, float | str]]] = {tokens: {} for tokens in given.tokens}
    for tokens, wire in itertools.product(given.tokens, given.formats):
        for transport, result in compare(tokens, wire, given.transports, given.rounds):
            name = transport if wire == AS_IS else f"{transport}, {wire}"
            results[tokens][name] = result
            print(f"{tokens} tokens, {name}: {result}", flush=True)
    save("handoff", {"tokens": results})


def compare(
    tokens: int, wire: str, names: list[str], rounds: int
) -> Iterator[tuple[str, dict[str, float | str]]]:
    """Measure all transports, alternating every ten rounds."""
    arms = {}
    with ExitStack() as stack:
        for name in names:
            transport, environment = ARMS[name]
            with changed(environment):
                connection = stack.enter_context(source(8 * num_blocks(tokens, BLOCK) + 1, wire))
                arms[name] = stack.enter_context(closing(Bench(connection, tokens, wire, transport)))
        for one in arms.values():
            for _ in range(5):  # the first ones connect and map
                one.round()
        for begun in range(0, rounds, TURN):
            for one in arms.values():
                one.results += [one.round() for _ in range(min(TURN, rounds - begun))]
        for name, one in arms.items():
            yield name, one.summary()


@contextmanager
def changed(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
