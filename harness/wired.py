"""A deployment whose parts each have a host of their own, joined by wires that are not ideal.

    with wired(tmp_path, prefill=2, decode=2) as one:
        one.links.be(Wire(delay_ms=50))
        with one.links.cut(("prefill-0", "decode-1")):
            ...                                       # requests to one.url, from one.network.inside()

Hosts are named as their parts: scheduler, router, prefill-0, decode-0 and so on. gRPC goes over the wires,
with mutual TLS; clients come over the network's bridge, which is ideal, to the router alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from baton.security.authority import Authority
from harness import netns, zygote
from harness.deployment import ENGINE, START_S, status_of
from harness.links import Links
from harness.netns import Host, Network
from harness.support import BATON, CALL_S, ROOT, eventually
from harness.zygote import Forked

SCHEDULER_PORT, WORKER_PORT, ROUTER_PORT = 7400, 7401, 8000
END_S = 20.0


@dataclass
class Wired:
    """The hosts, the wires between them, and the deployment."""

    network: Network
    links: Links
    folder: Path
    cold: bool  # start commands as a person does; else fork them
    hosts: dict[str, Host] = field(default_factory=dict)
    processes: dict[str, Forked | subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The router's, inside the network."""
        return f"http://{self.hosts['router'].address}:{ROUTER_PORT}"

    @property
    def workers(self) -> list[str]:
        return [name for name in self.hosts if name not in ("scheduler", "router")]

    def text(self, name: str) -> str:
        """Return everything that a part printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """Return what `baton status --json` says on the scheduler's host."""
        command = [str(BATON), "status", "--json", "--config", str(self.folder / "baton.yaml")]
        done = self.hosts["scheduler"].run(command, CALL_S, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def ready(self) -> set[str]:
        """Return the names of the workers that are ready, as the scheduler knows them."""
        workers = self.status().get("workers", [])
        return {one["identity"]["worker_id"] for one in workers if one["state"] == "WORKER_STATE_READY"}

    def wait_ready(self) -> None:
        """Wait until the router answers, and the scheduler knows all workers as ready."""

        def look() -> bool:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended:\n{self.text(name)[-3000:]}"
            with self.network.inside():
                if status_of(f"{self.url}/health") != 200:
                    return False
            return self.ready() == set(self.workers)

        eventually(look, START_S, f"all parts are ready; logs in {self.folder}", every_s=1.0)

    def start(self, name: str, *command: str) -> None:
        """Start `baton COMMAND` on the host of that name."""
        host = self.hosts[name]
        line = [*command, "--config", str(self.folder / "baton.yaml")]
        if self.cold:
            with (self.folder / f"{name}.log").open("wb") as out:
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as the forked ones have it
                self.processes[name] = host.start([str(BATON), *line], env=environment, cwd=ROOT, out=out)
            return
        arguments = {"pid": host.pid, "arguments": line}
        self.processes[name] = zygote.shared().start(
            name, "harness.wired:run_inside", self.folder, **arguments
        )

    def close(self) -> None:
        """End all parts, the workers first."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in reversed(self.processes.values()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait(END_S)


@contextmanager
def wired(
    folder: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    cold: bool = False,
    config: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Iterator[Wired]:
    """Run a deployment, which is ready; everything ends with the block. `config`: settings by section."""
    folder.mkdir(parents=True, exist_ok=True)
    with Network(folder / "hosts") as network, Links(network) as wires:
        one = Wired(network, wires, folder, cold)
        names = [
            *("scheduler", "router"),
            *(f"prefill-{number}" for number in range(prefill)),
            *(f"decode-{number}" for number in range(decode)),
        ]
        addresses = {}
        for name in names:
            one.hosts[name] = network.host(name, shm_mib=512)
            addresses[name] = wires.join(one.hosts[name])
        _write(folder, addresses["scheduler"], config)
        Authority.create(folder / "ca")
        try:
            one.start("scheduler", "scheduler")
            one.start("router", "router", "--host", one.hosts["router"].address, "--port", f"{ROUTER_PORT}")
            for name in one.workers:
                listen = f"{addresses[name]}:{WORKER_PORT}"
                one.start(name, name.partition("-")[0], "--listen", listen, "--worker-id", name)
            one.wait_ready()
            yield one
        finally:
            one.close()


def run_inside(pid: int, arguments: list[str]) -> None:
    """Run Baton's command line in this forked process on the host whose first process is `pid`."""
    netns.move_to(pid)
    zygote.run_baton(arguments)


def _write(folder: Path, scheduler: str, config: Mapping[str, Mapping[str, Any]]) -> None:
    sections: dict[str, dict[str, Any]] = {
        "engine": dict(ENGINE),
        "scheduler": {"address": f"{scheduler}:{SCHEDULER_PORT}"},
        "handoff": {"staging_mib": 128},
        "security": {"tls": True, "ca": str(folder / "ca")},
    }
    for name, values in config.items():
        sections.setdefault(name, {}).update(values)
    (folder / "baton.yaml").write_text(yaml.safe_dump(sections))
