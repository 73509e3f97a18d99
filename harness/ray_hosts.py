"""Run `baton ray up` on hosts of harness/netns.py: Ray on each, prefill on the first, decode on another.

Each host has one core. More hosts may join, and any may be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.chaos.proxy import Proxy
from harness.deployment import ENGINE
from harness.netns import Host, Network
from harness.ray_head import LESS, LESS_HEAD, RAY
from harness.support import BATON, CALL_S, PYTHON, ROOT, eventually

GCS_PORT, ROUTER_PORT = 6379, 8000
START_S = 200.0
COMMON = ("--block", "--num-cpus=1", *LESS, "--disable-usage-stats")
# By default Ray takes half a minute to declare a silent host dead. With these settings, busy hosts die, too.
QUICK = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass
class RayHosts:
    network: Network
    first: Host
    second: Host
    up: subprocess.Popen[bytes]
    output: Path
    environment: dict[str, str]

    @property
    def url(self) -> str:
        """The first router's URL, inside the network."""
        return f"http://{self.first.address}:{ROUTER_PORT}"

    @property
    def ray_address(self) -> str:
        return f"{self.first.address}:{GCS_PORT}"

    @property
    def text(self) -> str:
        return self.output.read_text()

    def baton(self, *command: str) -> str:
        """Run `baton COMMAND` on the first host and return its output."""
        done = self.first.run([str(BATON), *command], CALL_S, env=self.environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(
            self.baton("ray", "status", "--json", "--address", self.ray_address)
        )
        return told

    def join(self, name: str) -> Host:
        """Start Ray on another host with room for one worker, without waiting for Ray."""
        core = sorted(os.sched_getaffinity(0))[-1]
        return _ray(self.network, self.environment, name, core, f"--address={self.ray_address}")

    @contextmanager
    def forwarded(self, to: Host | None = None) -> Iterator[str]:
        """Yield a loopback URL that forwards to a host's router, by default the first's."""
        listener = socket.create_server(("127.0.0.1", 0))
        proxy, loop = Proxy((to or self.first).address), asyncio.new_event_loop()
        proxy.target = ROUTER_PORT

        def serve() -> None:
            with self.network.inside():  # the listener stays in the machine's network
                loop.run_until_complete(proxy.start(listener))
                loop.run_forever()
                loop.run_until_complete(proxy.close())
            loop.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(CALL_S)


def _ray(network: Network, environment: Mapping[str, str], name: str, core: int, *options: str) -> Host:
    pinned = ["taskset", "--cpu-list", str(core), str(PYTHON.with_name("ray")), "start"]
    command = [*pinned, *COMMON, f"--labels=host={name}", *options]
    # Ray's sockets need short paths, and each host needs its own /run/ray.
    setup = "mount -t tmpfs tmpfs /run; mkdir /run/ray"
    return network.host(name, command, env=environment, cwd=ROOT, shm_mib=512, setup=setup)


def _cluster_file(folder: Path, routers: int, die: bool, sections: Mapping[str, Any]) -> Path:
    """Write cluster.yaml: prefill on the first host, decode on any other. `sections` override it."""
    sides = {
        f"{role}_config": {
            "label_selector": {"host": host},
            "placement_group_config": {"bundles": [{"CPU": 1}]},
            "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        }
        for role, host in (("prefill", "first"), ("decode", "!first"))
    }
    own = {
        "router_config": {"deployment_config": {"num_replicas": routers}},
        "engine": ENGINE,
        # Each host shares its one core with other tests, and a worker that is late must not seem lost.
        "scheduler": {"worker_lease_s": 2.0 if die else 15.0},
        "handoff": {"staging_mib": 64},
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({**own, **sides, **sections}))
    return path


@contextmanager
def ray_hosts(folder: Path, routers: int = 1, *, die: bool = False, **sections: Any) -> Iterator[RayHosts]:
    """Run a deployment on two hosts during the block. Yield it when it is ready.

    die: a host will die, which Ray and the scheduler should notice soon. sections: replace sections of
    cluster.yaml, which serves the demo model with prefill and decode on separate hosts.
    """
    environment = {**os.environ, **RAY, **(QUICK if die else {}), "BATON_SECURITY__CA": str(folder / "ca")}
    with Network(folder) as network:
        head = ("--head", f"--port={GCS_PORT}", "--temp-dir=/run/ray", *LESS_HEAD)
        cores = sorted(os.sched_getaffinity(0))
        first = _ray(network, environment, "first", cores[0], *head)

        def started() -> bool:
            assert first.process.poll() is None, first.text
            return "Ray runtime started" in first.text

        eventually(started, 60, "Ray's head runs")
        address = f"{first.address}:{GCS_PORT}"
        second = _ray(network, environment, "second", cores[-1], f"--address={address}")
        output = folder / "up.log"
        with output.open("wb") as out:
            file, logs = _cluster_file(folder, routers, die, sections), folder / "logs"
            command = [str(BATON), "ray", "up", str(file), "--log-dir", str(logs)]
            up = first.start([*command, "--address", address], env=environment, cwd=ROOT, out=out)
        one = RayHosts(network, first, second, up, output, environment)

        def ready() -> bool:
            assert up.poll() is None, one.text
            assert second.process.poll() is None, second.text
            return "\nReady." in one.text

        eventually(ready, START_S, f"baton ray up is ready; {output}")
        yield one
