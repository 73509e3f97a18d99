"""The cost of mutual TLS on a handoff over gRPC: the same KV in plain text and encrypted, in turns.

    python -m bench tls [--tokens 900 3600] [--rounds 40]

Two sources in processes of their own, one with a certificate and one without, and one puller; caches and
checks are those of `bench handoff`. Connecting is a new channel and its first call, a call one on a channel
that is there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from baton import rpc
from baton.handoff import transports
from baton.handoff.channels import HandoffClient
from baton.handoff.load.loader import Loader
from baton.handoff.manifest import num_blocks
from baton.kernels.kv_pack import AS_IS
from baton.protos.handoff_pb2 import Shard
from baton.security import identity
from baton.security.authority import Authority
from baton.security.identity import Identity
from baton.security.names import Name, Role
from bench.handoff import MIB, Bench, Shape, source
from harness.stats import save

WARM_UP = 5
CALLS = 200
CONNECTIONS = 40


def source_as(connection: Connection, shape: Shape, folder: str) -> None:
    """Run a source that is who the folder says; plain text if it is empty."""
    rpc.act_as(Identity(Path(folder)) if folder else None)
    source(connection, shape)


class Side:
    """One of the two that are compared."""

    def __init__(self, name: str, shape: Shape, folders: tuple[str, str], stack: ExitStack) -> None:
        """Start a source. folders: of the source's identity, and of the puller's."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        process = context.Process(target=source_as, args=(theirs, shape, folders[0]), daemon=True)
        process.start()
        connection.recv()
        rpc.act_as(Identity(Path(folders[1])) if folders[1] else None)
        self._bench = Bench(shape, connection)
        pulling = transports.create(["grpc"])
        self._loader = Loader(
            self._bench.cache,
            self._bench.puller,
            pulling,
            self._bench.client,
            pull_timeout_s=20,
            chunk_bytes=shape.chunk_mib * MIB,
        )
        self.address = ""
        self.mib = 0.0
        self.move_ms: list[float] = []
        self.total_ms: list[float] = []
        self.connect_ms: list[float] = []
        self.call_ms: list[float] = []
        stack.callback(process.join, 10)
        stack.callback(connection.send, None)
        stack.callback(pulling[0].close)
        stack.callback(self._loader.close)

    def round(self) -> None:
        """Hand one prompt's KV over."""
        saved, load, wall_ms = self._bench.round(self._loader)
        self.address = Shard.FromString(saved.shard).address
        self.mib = load.bytes / MIB
        self.move_ms.append(load.costs.move_ms)
        self.total_ms.append(saved.save_ms + wall_ms)

    def call(self) -> None:
        """Ask the source one small thing."""
        self.call_ms.append(_timed(lambda: self._bench.client.staged([self.address])))

    def connect(self, folder: str) -> None:
        """Do so over a connection of its own."""
        rpc.act_as(Identity(Path(folder)) if folder else None)
        client = HandoffClient()
        self.connect_ms.append(_timed(lambda: client.staged([self.address])))
        client.close()

    def figures(self) -> dict[str, float]:
        """Return the medians."""
        move_ms = statistics.median(self.move_ms[WARM_UP:])
        return {
            "MiB": round(self.mib, 1),
            "move_ms": round(move_ms, 2),
            "MiB_per_s": round(self.mib / move_ms * 1e3),
            "total_ms": round(statistics.median(self.total_ms[WARM_UP:]), 2),
            "call_ms": round(statistics.median(self.call_ms), 3),
            "connect_ms": round(statistics.median(self.connect_ms), 2),
        }


def _timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3


def compare(tokens: int, rounds: int, folders: tuple[str, str]) -> dict[str, dict[str, float]]:
    """Measure both in turns: plain, TLS, TLS, plain, and so on. folders: identities of source and puller."""
    shape = Shape(12, 4, 64, 32, 8 * num_blocks(tokens, 32) + 1, tokens, 4, AS_IS)
    with ExitStack() as stack:
        plain = Side("plain", shape, ("", ""), stack)
        tls = Side("tls", shape, folders, stack)
        for number in range(rounds + WARM_UP):
            for side in (plain, tls) if number % 2 else (tls, plain):
                side.round()
        for number in range(CALLS):
            for side in (plain, tls) if number % 2 else (tls, plain):
                side.call()
        for _ in range(CONNECTIONS):
            plain.connect("")
            tls.connect(folders[1])
        return {side.name: side.figures() for side in (plain, tls)}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[900, 3600], help="of the prompt")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args(arguments)
    results: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.create(Path(folder, "ca"))
        for worker_id in ("source", "puller"):
            identity.write(Path(folder, worker_id), authority.issue(Name("bench", Role.WORKER, worker_id)))
        folders = (str(Path(folder, "source")), str(Path(folder, "puller")))
        for tokens in given.tokens:
            results[tokens] = compare(tokens, given.rounds, folders)
            for name, figures in results[tokens].items():
                print(f"{tokens} tokens, {name}: {json.dumps(figures)}", flush=True)
    save("tls", {"tokens": results})
