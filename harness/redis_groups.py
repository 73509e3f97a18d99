"""Replicated Redis: plain replicas, Sentinels, and a Redis Cluster."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from harness.scheduling import RedisServer
from harness.support import eventually, free_port, listening, running

MASTER = "mymaster"
DEAD_MS = 2_000  # silence after which a server counts as dead; a busy machine stalls for less


@contextlib.contextmanager
def servers(
    folder: Path, count: int, extra: tuple[str, ...] = (), password: str = ""
) -> Iterator[list[RedisServer]]:
    auth = ("--masterauth", password) if password else ()
    extra = (*extra, *auth, "--repl-diskless-sync-delay", "0")
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(count):
            (own := folder / f"redis-{number}").mkdir(parents=True, exist_ok=True)
            made.append(stack.enter_context(RedisServer(own, password=password, extra=extra)))
        yield made


def admin(server: RedisServer) -> Redis:
    return Redis(host="127.0.0.1", port=server.port, password=server.password or None)


def follow(replica: RedisServer, master: RedisServer) -> None:
    """Make a server a replica and wait until it has the master's data."""
    with admin(replica) as client:
        client.replicaof("127.0.0.1", str(master.port))
        eventually(lambda: _synced(client), 10, "the replica is in sync")


def promote(replica: RedisServer, master: RedisServer) -> None:
    """Wait until a replica has all of its master's writes, then promote it."""
    with admin(replica) as client, admin(master) as old:
        offset = _replication(old)["master_repl_offset"]
        eventually(
            lambda: _replication(client)["slave_repl_offset"] >= offset, 10, "the replica has all writes"
        )
        client.replicaof("NO", "ONE")


def _replication(client: Redis) -> dict[str, Any]:
    found: dict[str, Any] = client.info("replication")
    return found


def _synced(client: Redis) -> bool:
    info = _replication(client)
    return bool(info["role"] == "slave" and info["master_link_status"] == "up")


@contextlib.contextmanager
def sentinels(
    folder: Path, master: RedisServer, count: int, password: str = "", replicas: int = 1
) -> Iterator[list[int]]:
    """Run Sentinels that watch `master`. Yield their ports. password: the Sentinels' own."""
    ports = [free_port() for _ in range(count)]
    with contextlib.ExitStack() as stack:
        for port in ports:
            lines = [
                f"port {port}",
                "bind 127.0.0.1",
                f"dir {folder}",
                f"sentinel monitor {MASTER} 127.0.0.1 {master.port} {count // 2 + 1}",
                f"sentinel down-after-milliseconds {MASTER} {DEAD_MS}",
                f"sentinel failover-timeout {MASTER} 3000",
                *([f"sentinel auth-pass {MASTER} {master.password}"] if master.password else []),
                *([f"requirepass {password}", f"sentinel sentinel-pass {password}"] if password else []),
            ]
            (config := folder / f"sentinel-{port}.conf").write_text("\n".join([*lines, ""]))
            command = ["redis-server", config, "--sentinel"]
            stack.enter_context(running(command, partial(listening, port), 10))
        for port in ports:
            _wait_for_sentinel(port, password, count, replicas)
        yield ports


def _wait_for_sentinel(port: int, password: str, count: int, replicas: int) -> None:
    with Redis(host="127.0.0.1", port=port, password=password or None) as client:

        def complete() -> bool:
            state: Any = client.sentinel_master(MASTER)
            return bool(state["num-other-sentinels"] == count - 1 and state["num-slaves"] >= replicas)

        eventually(complete, 20, "the Sentinels know each other and the replicas")


@contextlib.contextmanager
def cluster(folder: Path, masters: int = 3, replicas: int = 0) -> Iterator[list[RedisServer]]:
    """Run a Redis Cluster with `replicas` replicas per master."""
    with contextlib.ExitStack() as stack:
        made: list[RedisServer] = []
        for number in range(masters * (1 + replicas)):
            extra = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
            extra += ["--cluster-node-timeout", str(DEAD_MS)]
            made += stack.enter_context(servers(folder / str(number), 1, tuple(extra)))
        addresses = [f"127.0.0.1:{one.port}" for one in made]
        create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(
            [*create, "--cluster-replicas", str(replicas)], check=True, capture_output=True, timeout=60
        )
        eventually(
            lambda: all(_serves(one, len(made)) for one in made), 20, "each node knows the whole cluster"
        )
        yield made


def _serves(server: RedisServer, nodes: int) -> bool:
    with admin(server) as client:
        info: Any = client.cluster("INFO")
        role: Any = client.role()
    linked = role[0] != b"slave" or role[3] == b"connected"
    return bool(info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == nodes and linked)


def owner(nodes: list[RedisServer], key: str) -> RedisServer:
    for node in nodes:
        with admin(node) as client, contextlib.suppress(RedisError):
            client.exists(key)
            return node
    raise AssertionError(f"no node has the slot of {key}")
