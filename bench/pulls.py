"""Measure pulls of KV over TCP: throughput, CPU time, and how much they slow an engine in the same process.

    python -m bench pulls [--mib 11 256] [--record-kib 16 384 4096] [--rounds 20]

A source with saved records and a puller run as two processes on one machine; pulls in plain text and with
mutual TLS alternate. The puller digests and copies the records, as a load does, and compares the digests: a
mismatch aborts the run, and no figures are printed. CPU seconds (user and system) are given for each process,
for pulls without an engine. The engine is a thread of the puller's process that adds and multiplies small
tensors. Its figures are its step rate during a pull, as a share of its rate without one, and the p95 time of
these steps.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton import rpc
from baton.handoff import digests
from baton.handoff.memory.arena import Arena
from baton.handoff.save.service import HandoffService
from baton.handoff.save.staging import Staging
from baton.handoff.transports.base import Cancellation, Pull
from baton.handoff.transports.tcp import Tcp
from baton.kernels import kv_pack
from baton.protos.handoff_pb2 import Shard
from baton.security import identity
from baton.security.authority import Authority
from baton.security.identity import Identity
from baton.security.names import Name, Role
from bench.handoff import CHUNK, MIB, source
from bench.options import options
from harness.stats import percentile, save, spread

WARM_UP = 2
KEY = ("bench", 1)


def main(arguments: list[str]) -> None:
    given = options(__doc__, arguments, mib=([11, 256], "of a pull"), record_kib=[16, 384, 4096], rounds=20)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.create(Path(folder, "ca"))
        for worker_id in ("source", "puller"):
            identity.write(Path(folder, worker_id), authority.issue(Name("bench", Role.WORKER, worker_id)))
        for mib, kib in itertools.product(given.mib, given.record_kib):
            with ExitStack() as stack:
                arms = {
                    name: Arm(stack, mib * MIB // (kib << 10), kib << 10, identities)
                    for name, identities in (("plain", None), ("tls", Path(folder)))
                }
                measure(arms, given.rounds)
            for arm, one in arms.items():
                name = f"{arm}, {mib} MiB, records of {kib} KiB"
                found[name] = one.figures()
                medians = ", ".join(f"{key} {value['p50']:g}" for key, value in found[name].items())
                print(f"{name}: {medians}", flush=True)
    save("pulls", {"rounds": given.rounds, "pulls": found})


class Arm:
    """A source and the pulls from it."""

    def __init__(self, stack: ExitStack, count: int, record_bytes: int, folder: Path | None) -> None:
        """Start the source. folder: both ends' certificates, or None for plain text."""
        theirs = folder and str(folder / "source")
        self._source = stack.enter_context(source(serve, count, record_bytes, theirs))
        self._shard, self._count = Shard.FromString(self._source.recv()), count
        stack.callback(rpc.act_as, None)
        self._identity = Identity(folder / "puller") if folder else None
        rpc.act_as(self._identity)
        self._transport = Tcp()
        stack.callback(self._transport.close)
        self._gb = count * record_bytes / 1e9
        self._rounds: list[dict[str, float]] = []

    def pull(self) -> float:
        """Pull once and return the seconds it took. Raises DigestMismatch for a wrong byte."""
        shard, count = self._shard, self._count
        rpc.act_as(self._identity)
        seed, room = digests.seed(*KEY), _room(count * shard.record_bytes)
        began = time.monotonic()
        pull = Pull(*KEY, shard, count, 0, count, CHUNK, Cancellation(began + 60))
        for records in self._transport.pull(pull):
            own = digests.of_records(records.data, seed, records.first_block)
            digests.compare(pull.what, records.first_block, own, records.digests)
            at = records.first_block * shard.record_bytes
            room[at : at + records.data.size] = records.data.reshape(-1)
        return time.monotonic() - began

    def _cpu_s(self) -> float:
        self._source.send(True)
        return float(self._source.recv())

    def round(self) -> None:
        """Pull once without an engine and once with one."""
        theirs, ours = self._cpu_s(), time.process_time()
        took_s = self.pull()
        cpu = {"puller": time.process_time() - ours, "source": self._cpu_s() - theirs}
        with Engine() as engine:
            alone, _ = engine.steps(lambda: time.sleep(0.1))
            beside, slow_s = engine.steps(self.pull)
        self._rounds.append(
            {
                "gb_s": self._gb / took_s,
                **{f"{name}_cpu_s_a_gb": seconds / self._gb for name, seconds in cpu.items()},
                "engine_share": beside / alone,
                "engine_step_p95_ms": 1e3 * slow_s,
            }
        )

    def figures(self) -> dict[str, dict[str, float]]:
        """Return each figure's median and quartiles."""
        kept = self._rounds[WARM_UP:]
        return {key: spread([one[key] for one in kept]) for key in kept[0]}


_rooms: dict[int, Any] = {}


def _room(size: int) -> Any:
    """Return memory for a pull whose pages are already mapped."""
    if size not in _rooms:
        _rooms.clear()
        _rooms[size] = np.ones(size, np.uint8)
    return _rooms[size]


def measure(arms: dict[str, Arm], rounds: int) -> None:
    """Alternate between the arms: A B, B A, and so on."""
    order = list(arms.values())
    for _ in range(rounds + WARM_UP):
        for arm in order:
            arm.round()
        order.reverse()


class Engine:
    """A thread that runs steps of twenty small tensor operations and a larger one."""

    def __init__(self) -> None:
        self._took: list[float] = []  # seconds of each step
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def steps(self, act: Callable[[], object]) -> tuple[float, float]:
        """Return the steps per second while `act` runs and their p95 time in seconds."""
        before, began = len(self._took), time.monotonic()
        act()
        took = self._took[before:]
        return len(took) / (time.monotonic() - began), percentile(took, 0.95)

    def _run(self) -> None:
        torch.set_num_threads(1)
        small, large = torch.randn(64, 64), torch.randn(256, 256)
        while not self._stop:
            began = time.monotonic()
            for _ in range(20):
                torch.add(small, small)
            torch.mm(large, large)
            self._took.append(time.monotonic() - began)


def serve(connection: Connection, count: int, record_bytes: int, folder: str | None) -> None:
    """Save records and serve them in the source's process."""
    rpc.act_as(Identity(Path(folder)) if folder else None)
    staging = Staging(Arena((count + 2) * (record_bytes + 4096), record_bytes), lease_s=3600)
    entry, random = staging.reserve(*KEY, count), np.random.default_rng(0)
    fill = staging.filling(entry)
    for first, stop in entry.view.pieces(0, count, max(1, CHUNK // record_bytes)):
        records = entry.view.records(first, stop)
        records[:] = random.integers(0, 256, records.shape, np.uint8)
        own = np.empty(len(records), np.uint64)
        kv_pack.digest(records, own)
        fill.add(own)
    fill.close()
    staging.publish(entry)
    service = HandoffService(staging, 0, "127.0.0.1:0", CHUNK)
    shard = Shard(address=service.address, record_bytes=record_bytes, ticket=staging.tickets.of(*KEY))
    connection.send(shard.SerializeToString())
    while connection.recv():
        connection.send(time.process_time())
    service.close()
    staging.close()
