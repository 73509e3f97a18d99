"""The rate of a pull over TCP, and what it does to an engine beside it.

    python -m bench pulls [--mib 11 256] [--record-kib 16 384 4096] [--rounds 20]

A source with saved records and a puller, two processes on one machine, in plain text and with mutual TLS, in
turns. The puller digests and copies what comes, as a load does, and compares the digests: one difference ends
the run without figures. CPU seconds are those of each process, user and system, for pulls without an engine.
The engine is a thread of the puller's process that adds and multiplies small tensors: the steps that it does
in a second, of those without a pull, and how long its slowest ones take (p95).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from baton.handoff.transports.base import Pull
from baton.handoff.transports.tcp import Tcp
from baton.kernels import kv_pack
from baton.protos.handoff_pb2 import Shard
from baton.security import identity
from baton.security.authority import Authority
from baton.security.identity import Identity
from baton.security.names import Name, Role
from harness.stats import percentile, save, spread

MIB = 1 << 20
CHUNK = 4 * MIB  # of the source
WARM_UP = 2
KEY = ("bench", 1)
Saved = tuple[Shard, int]  # and its records


def main(arguments: list[str]) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench pulls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[11, 256], help="of a pull")
    parser.add_argument("--record-kib", type=int, nargs="+", default=[16, 384, 4096])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.create(Path(folder, "ca"))
        for worker_id in ("source", "puller"):
            identity.write(Path(folder, worker_id), authority.issue(Name("bench", Role.WORKER, worker_id)))
        for mib, kib in itertools.product(options.mib, options.record_kib):
            with ExitStack() as stack:
                arms = {
                    name: Arm(stack, mib * MIB // (kib << 10), kib << 10, identities)
                    for name, identities in (("plain", None), ("tls", Path(folder)))
                }
                measure(arms, options.rounds)
            for arm, one in arms.items():
                name = f"{arm}, {mib} MiB, records of {kib} KiB"
                found[name] = one.figures()
                medians = ", ".join(f"{key} {value['p50']:g}" for key, value in found[name].items())
                print(f"{name}: {medians}", flush=True)
    save("pulls", {"rounds": options.rounds, "pulls": found})


class Arm:
    """A source, and the pulls from it."""

    def __init__(self, stack: ExitStack, count: int, record_bytes: int, folder: Path | None) -> None:
        """Start the source. folder: of both ends' certificates; None: plain text."""
        self._saved, self._cpu_s = stack.enter_context(source(count, record_bytes, folder))
        self._identity = Identity(folder / "puller") if folder else None
        rpc.act_as(self._identity)
        self._transport = Tcp()
        stack.callback(self._transport.close)
        self._gb = count * record_bytes / 1e9
        self._rounds: list[dict[str, float]] = []

    def pull(self) -> float:
        """Pull once, and return the seconds that it took. Raises DigestMismatch for a wrong byte."""
        shard, count = self._saved
        rpc.act_as(self._identity)
        seed, room = digests.seed(*KEY), _room(count * shard.record_bytes)
        began = time.monotonic()
        pull = Pull(*KEY, shard, count, 0, count, began + 60, CHUNK)
        for records in self._transport.pull(pull):
            own = digests.of_records(records.data, seed, records.first_block)
            digests.compare(pull.what, records.first_block, own, records.digests)
            at = records.first_block * shard.record_bytes
            room[at : at + records.data.size] = records.data.reshape(-1)
        return time.monotonic() - began

    def round(self) -> None:
        """Pull without an engine, and with one beside."""
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
        """Return the median and the quartiles of each figure."""
        kept = self._rounds[WARM_UP:]
        return {key: spread([one[key] for one in kept]) for key in kept[0]}


_rooms: dict[int, Any] = {}


def _room(size: int) -> Any:
    """Return memory for what is pulled, whose pages are there."""
    if size not in _rooms:
        _rooms.clear()
        _rooms[size] = np.ones(size, np.uint8)
    return _rooms[size]


def measure(arms: dict[str, Arm], rounds: int) -> None:
    """Pull in turns: A B, B A, and so on."""
    order = list(arms.values())
    for _ in range(rounds + WARM_UP):
        for arm in order:
            arm.round()
        order.reverse()


class Engine:
    """A thread that does steps: some small operations in Python, and a larger one."""

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
        """Return the steps in a second while something is done, and what the slowest take (p95, seconds)."""
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


@contextmanager
def source(count: int, record_bytes: int, folder: Path | None) -> Iterator[tuple[Saved, Callable[[], float]]]:
    """Save records in a process of their own; this one becomes their puller.

    Yields where they are, and a function that returns the CPU seconds of that process.
    """
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        connection, theirs = context.Pipe()
        given = (theirs, count, record_bytes, folder and str(folder / "source"))
        process = context.Process(target=serve, args=given, daemon=True)
        process.start()
        stack.callback(process.join, 10)
        stack.callback(connection.send, False)

        def cpu_s() -> float:
            connection.send(True)
            return float(connection.recv())

        yield (Shard.FromString(connection.recv()), count), cpu_s
    rpc.act_as(None)


def serve(connection: Connection, count: int, record_bytes: int, folder: str | None) -> None:
    """Run the source."""
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
