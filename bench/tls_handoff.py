"""The cost of mutual TLS on a handoff over TCP: the same KV in plain text and encrypted, in turns.

Two sources in processes of their own, one with a certificate and one without, and one puller; caches and
checks are those of `bench handoff`. Connecting is a new channel of gRPC and its first call, a call one on a
channel that is there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from baton import rpc
from baton.handoff.channels import HandoffClient
from baton.handoff.groups import num_blocks
from baton.kernels.kv_pack import AS_IS
from baton.protos.handoff_pb2 import Shard
from baton.security import identity
from baton.security.authority import Authority
from baton.security.identity import Identity
from baton.security.names import Name, Role
from bench.handoff import MIB, Bench, Shape, source
from harness.stats import compared

TOKENS = (900, 3600)  # of the prompt
ROUNDS = 40
WARM_UP = 5
CALLS = 400
CONNECTIONS = 80

Spreads = dict[str, dict[str, float]]


def measure() -> dict[str, Any]:
    """Measure handoffs, calls and connections."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.create(Path(folder, "ca"))
        for worker_id in ("source", "puller"):
            identity.write(Path(folder, worker_id), authority.issue(Name("bench", Role.WORKER, worker_id)))
        folders = (str(Path(folder, "source")), str(Path(folder, "puller")))
        found: dict[str, Any] = {"transport": "TCP", "rounds": ROUNDS, "tokens": {}}
        for tokens in TOKENS:
            with both(tokens, folders) as sides:
                found["tokens"][str(tokens)] = handoffs(sides)
                if tokens == TOKENS[0]:
                    found["calls"] = calls(sides)
    return found


class Side:
    """One of the two that are compared."""

    def __init__(self, shape: Shape, folders: tuple[str, str], stack: ExitStack) -> None:
        """Start a source. folders: of the source's identity, and of the puller's; empty: plain text."""
        self._folder = folders[1]
        self._become()
        self._bench = Bench(shape, "tcp", source_as, folders[0])
        self.address = ""
        self.mib = 0.0
        self.ms: dict[str, list[float]] = {"move_ms": [], "total_ms": [], "call_ms": [], "connect_ms": []}
        stack.callback(self._bench.close)

    def round(self) -> None:
        """Hand one prompt's KV over."""
        saved, load, wall_ms = self._bench.round()
        self.address = Shard.FromString(saved.shard).address
        self.mib = load.bytes / MIB
        self.ms["move_ms"].append(load.costs.move_ms)
        self.ms["total_ms"].append(saved.save_ms + wall_ms)

    def call(self) -> None:
        """Ask the source one small thing."""
        self.ms["call_ms"].append(_timed(lambda: self._bench.client.staged([self.address])))

    def connect(self) -> None:
        """Do so over a connection of its own."""
        self._become()
        client = HandoffClient()
        self.ms["connect_ms"].append(_timed(lambda: client.staged([self.address])))
        client.close()

    def _become(self) -> None:
        rpc.act_as(Identity(Path(self._folder)) if self._folder else None)


def source_as(connection: Connection, shape: Shape, folder: str) -> None:
    """Run a source that is who the folder says; plain text if it is empty."""
    rpc.act_as(Identity(Path(folder)) if folder else None)
    source(connection, shape)


@contextmanager
def both(tokens: int, folders: tuple[str, str]) -> Iterator[dict[str, Side]]:
    """Start both sides, for prompts of so many tokens. folders: identities of source and puller."""
    shape = Shape(12, 4, 64, 32, 8 * num_blocks(tokens, 32) + 1, tokens, 4, AS_IS)
    with ExitStack() as stack:
        yield {"plain": Side(shape, ("", ""), stack), "tls": Side(shape, folders, stack)}


def handoffs(sides: dict[str, Side]) -> dict[str, Any]:
    """Hand over in turns."""
    _in_turns(sides, ROUNDS + WARM_UP, Side.round)
    return {
        "MiB": round(sides["plain"].mib, 1),
        **{key: _compared(sides, key, WARM_UP) for key in ("move_ms", "total_ms")},
    }


def calls(sides: dict[str, Side]) -> dict[str, Spreads]:
    """Call, and connect, in turns."""
    _in_turns(sides, CALLS, Side.call)
    _in_turns(sides, CONNECTIONS, Side.connect)
    return {key: _compared(sides, key) for key in ("call_ms", "connect_ms")}


def _in_turns(sides: dict[str, Side], times: int, act: Callable[[Side], None]) -> None:
    """Let both act so many times: plain, TLS, TLS, plain, and so on."""
    pair = list(sides.values())
    for _ in range(times):
        for side in pair:
            act(side)
        pair.reverse()


def _compared(sides: dict[str, Side], key: str, skipped: int = 0) -> Spreads:
    return compared({name: side.ms[key][skipped:] for name, side in sides.items()})


def _timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3
