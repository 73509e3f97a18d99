"""The cost of a handoff: a prompt's KV from a cache in one process to a cache in another, by transport.

    python -m bench handoff [--tokens 100 900 3600] [--rounds 40] [--formats auto int8]

No engine runs: two processes with caches of the model's shapes, random numbers, random blocks. A round saves
(gather, digest, publish), pulls (move, digest, scatter) and compares every byte; one difference ends the run
without figures. On one machine NIXL copies out of the other process; over TCP it does as between hosts that
have no RDMA. Ten rounds of each transport at a time, in turns.
Defaults are the shapes of an 80 M model: 12 layers, 4 KV heads of 64, bfloat16, blocks of 32 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch

from baton.handoff import transports
from baton.handoff.channels import HandoffClient
from baton.handoff.groups import CacheGroup, Part, described, num_blocks
from baton.handoff.load.job import LoadJob
from baton.handoff.load.loader import Loader
from baton.handoff.manifest import Puller, seal
from baton.handoff.memory.arena import Arena
from baton.handoff.memory.blocks import block_cache
from baton.handoff.memory.host import HostBlockCache
from baton.handoff.reports import ShardLoad, ShardSave
from baton.handoff.save.saver import SaveJob, Saver
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.kernels.kv_pack import AS_IS, WIRE_DTYPES
from baton.protos.handoff_pb2 import Manifest, Shard
from harness.stats import save

MIB = 1 << 20
HASH = "bench"
TURN = 10  # rounds


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    head_dim: int
    block_size: int
    cache_blocks: int
    tokens: int
    chunk_mib: int
    wire: str

    @property
    def blocks(self) -> int:
        return num_blocks(self.tokens, self.block_size)

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.cache_blocks, self.heads, self.block_size, 2 * self.head_dim)
        return {f"layers.{i}": torch.randn(shape, generator=generator).bfloat16() for i in range(self.layers)}

    def cache(self, tensors: dict[str, torch.Tensor], wire: str) -> HostBlockCache:
        made = block_cache(tensors, self.cache_blocks, wire, dict.fromkeys(tensors, self.head_dim))
        if not isinstance(made, HostBlockCache):
            raise TypeError("tensors of the CPU make a cache of the CPU")
        return made


def source(connection: Connection, shape: Shape) -> None:
    """Run the prefill worker's side in a process of its own: save on request."""
    cache = shape.cache(shape.tensors(1), shape.wire)
    offering = transports.create(transports.possible())
    pin = partial(transports.register, offering)
    withdraw = partial(transports.withdraw, offering)
    staging = Staging(Arena(512 * MIB, cache.record_bytes, pin=pin), 60, withdraw)
    service = HandoffService(staging, 0, "127.0.0.1:0", shape.chunk_mib * MIB)
    chunk_bytes = shape.chunk_mib * MIB
    saver = Saver(cache, staging, offering, rank=0, address=service.address, chunk_bytes=chunk_bytes)
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


ARMS: dict[str, tuple[str, dict[str, str]]] = {  # transport, and environment
    "shm": ("shm", {}),
    "nixl": ("nixl", {}),
    "nixl, TCP": ("nixl", {"UCX_TLS": "tcp,self"}),
    "tcp": ("tcp", {}),
}


class Bench:
    """One transport, with a source of its own."""

    def __init__(
        self, shape: Shape, transport: str, serve: Callable[..., None] = source, *more: object
    ) -> None:
        """Start the source: `serve`, which is called with a connection, the shape, and `more`."""
        self.shape = shape
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, shape, *more), daemon=True)
        self.process.start()
        self.pulling = transports.create([transport])
        self.connection.recv()
        tensors = shape.tensors(2)
        self.cache = shape.cache(tensors, shape.wire)
        self.plain = shape.cache(tensors, AS_IS)  # the same blocks, byte by byte
        self.groups = (CacheGroup(shape.block_size),)
        self.puller = Puller("bench", 0, HASH, self.groups, self.cache.layers, self.cache.form)
        self.client = HandoffClient()
        self.random = np.random.default_rng(0)
        self.count = 0
        self.loader = Loader(
            self.cache,
            self.puller,
            self.pulling,
            self.client,
            pull_timeout_s=20,
            chunk_bytes=shape.chunk_mib * MIB,
        )
        self.results: list[tuple[ShardSave, ShardLoad, float]] = []

    def round(self) -> tuple[ShardSave, ShardLoad, float]:
        """Do one handoff. Return its save, its load, and the pull's wall time in ms."""
        self.count += 1
        request_id = f"bench-{self.count}"
        theirs, both = self._blocks(1), self._blocks(2)
        ours, mirror = both[: self.shape.blocks], both[self.shape.blocks :]
        self.connection.send((request_id, theirs))
        saved, expected = self.connection.recv()
        if saved.problem is not None:
            raise SystemExit(f"save failed: {saved.problem}")
        manifest = Manifest(
            request_id=request_id,
            epoch=1,
            compatibility_hash=HASH,
            num_tokens=self.shape.tokens,
            num_blocks=self.shape.blocks,
            groups=described(self.groups, self.shape.tokens),
            shards=[Shard.FromString(saved.shard)],
            wire_dtype=self.shape.wire,
        )
        seal(manifest)
        start = time.monotonic()
        parts = (Part(0, 0, ours),)
        job = LoadJob(request_id, 1, self.shape.tokens, parts, start, manifest=manifest, complete=True)
        self.loader.reserve(job)
        while not (done := self.loader.take_finished()):
            time.sleep(0.0001)
        wall_ms = (time.monotonic() - start) * 1e3
        if done[0].problem is not None:
            raise SystemExit(f"load failed: {done[0].problem}")
        self.cache.scatter(0, expected, mirror)
        found, right = (np.empty((len(ours), self.plain.record_bytes), np.uint8) for _ in range(2))
        self.plain.gather(0, ours, found)
        self.plain.gather(0, mirror, right)
        if not np.array_equal(found, right):
            raise SystemExit("the bytes that came are not the bytes that were saved: no figures")
        return saved, done[0], wall_ms

    def _blocks(self, times: int) -> tuple[int, ...]:
        blocks = self.random.permutation(np.arange(1, self.shape.cache_blocks))
        return tuple(blocks[: times * self.shape.blocks].tolist())

    def run(self, rounds: int) -> None:
        self.results += [self.round() for _ in range(rounds)]

    def close(self) -> None:
        self.loader.close()
        self.pulling[0].close()
        self.client.close()
        self.connection.send(None)
        self.process.join(timeout=10)

    def summary(self) -> dict[str, float | str]:
        results = self.results
        parts = {
            "save": [saved.save_ms for saved, _, _ in results],
            "wait": [load.costs.wait_ms for _, load, _ in results],
            "move": [load.costs.move_ms for _, load, _ in results],
            "check": [load.costs.check_ms for _, load, _ in results],
            "load": [load.costs.load_ms for _, load, _ in results],
            "pull": [wall for _, _, wall in results],
            "total": [saved.save_ms + wall for saved, _, wall in results],
        }
        p95 = sorted(parts["total"])[int(0.95 * len(results))]
        return {
            "MB": round(results[0][1].bytes / 1e6, 1),
            **{f"{name}_ms": round(statistics.median(values), 2) for name, values in parts.items()},
            "total_p95_ms": round(p95, 2),
        }


def burn(stop: threading.Event) -> None:
    """Compute matrix products in place of an engine: a running batch keeps its core busy."""
    torch.set_num_threads(1)
    left = torch.randn(512, 512)
    while not stop.is_set():
        for _ in range(20):
            torch.mm(left, left)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 900, 3600], help="of the prompt")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--chunk-mib", type=int, default=4)
    parser.add_argument("--transports", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--formats", nargs="+", default=list(WIRE_DTYPES), choices=WIRE_DTYPES)
    parser.add_argument("--busy", action="store_true", help="the pulling process computes meanwhile")
    given = parser.parse_args(arguments)
    stop = threading.Event()
    busy = threading.Thread(target=burn, args=(stop,), daemon=True)
    if given.busy:
        busy.start()
    results: dict[int, dict[str, dict[str, float]]] = {tokens: {} for tokens in given.tokens}
    for tokens, wire in itertools.product(given.tokens, given.formats):
        shape = Shape(
            given.layers,
            given.heads,
            given.head_dim,
            given.block_size,
            8 * num_blocks(tokens, given.block_size) + 1,
            tokens,
            given.chunk_mib,
            wire,
        )
        for transport, result in compare(shape, given.transports, given.rounds):
            name = transport if wire == AS_IS else f"{transport}, {wire}"
            results[tokens][name] = result
            print(f"{tokens} tokens, {name}: {json.dumps(result)}", flush=True)
    save("handoff", {"busy": given.busy, "tokens": results})
    stop.set()


def compare(shape: Shape, names: list[str], rounds: int) -> Iterator[tuple[str, dict[str, float | str]]]:
    """Measure all in turns, ten rounds at a time."""
    arms = {}
    for name in names:
        transport, environment = ARMS[name]
        with changed(environment):
            arms[name] = Bench(shape, transport)
    for one in arms.values():
        one.run(5)  # the first ones connect and map
        one.results.clear()
    for begun in range(0, rounds, TURN):
        for one in arms.values():
            one.run(min(TURN, rounds - begun))
    for name, one in arms.items():
        yield name, one.summary()
        one.close()


@contextmanager
def changed(environment: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for a while."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
