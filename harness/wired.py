"""A deployment with one host per part, joined by wires of harness/links.py.

    with wired(tmp_path, config) as one:
        one.links.be(Wire(delay_ms=50))
        with one.links.cut(("prefill-0", "decode-0")):
            ...                                       # requests to one.url, from one.network.inside()

Hosts are named after their parts: scheduler, router, prefill-0, decode-0. gRPC uses the wires, with mutual
TLS; clients reach the router over the ideal bridge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from baton.security.authority import Authority
from harness import netns, zygote
from harness.deployment import ENGINE, START_S, status_of
from harness.links import Links
from harness.netns import Host, Network
from harness.ranks import fork_ranks
from harness.support import eventually
from harness.zygote import Forked

SCHEDULER_PORT, WORKER_PORT, ROUTER_PORT = 7400, 7401, 8000
WORKERS = ("prefill-0", "decode-0")
END_S = 20.0


@dataclass
class Wired:
    network: Network
    links: Links
    folder: Path
    hosts: dict[str, Host] = field(default_factory=dict)
    processes: dict[str, Forked] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The router's URL, inside the network."""
        return f"http://{self.hosts['router'].address}:{ROUTER_PORT}"

    def wait_ready(self) -> None:
        """Wait until the router serves, and the scheduler reports that all workers are ready."""

        def look() -> bool:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended:\n{process.text[-3000:]}"
            with self.network.inside():
                if status_of(f"{self.url}/health") != 200:
                    return False
            line = ("status", "--json", "--config", str(self.folder / "baton.yaml"))
            done = zygote.shared().command(*line, host=self.hosts["scheduler"].pid)
            assert done.returncode == 0, done.stderr
            workers = json.loads(done.stdout).get("workers", [])
            ready = [one["identity"]["worker_id"] for one in workers if one["state"] == "WORKER_STATE_READY"]
            return sorted(ready) == sorted(WORKERS)

        eventually(look, START_S, f"all parts are ready; logs in {self.folder}", every_s=1.0)

    def start(self, name: str, *command: str) -> None:
        host = self.hosts[name]
        line = [*command, "--config", str(self.folder / "baton.yaml")]
        arguments = {"pid": host.pid, "arguments": line}
        self.processes[name] = zygote.shared().start(name, f"{__name__}:run_inside", self.folder, **arguments)


@contextmanager
def wired(folder: Path, config: Mapping[str, Mapping[str, Any]]) -> Iterator[Wired]:
    """Run 1P1D with these sections of settings during the block. Yield it when it is ready."""
    folder.mkdir(parents=True, exist_ok=True)
    with Network(folder / "hosts") as network, Links() as wires:
        one = Wired(network, wires, folder)
        addresses = {}
        for name in ("scheduler", "router", *WORKERS):
            one.hosts[name] = network.host(name, shm_mib=512)
            addresses[name] = wires.join(one.hosts[name])
        _write(folder, addresses["scheduler"], config)
        Authority.create(folder / "ca")
        try:
            one.start("scheduler", "scheduler")
            one.start("router", "router", "--host", one.hosts["router"].address, "--port", f"{ROUTER_PORT}")
            for name in WORKERS:
                listen = f"{addresses[name]}:{WORKER_PORT}"
                one.start(name, name.partition("-")[0], "--listen", listen, "--worker-id", name)
            one.wait_ready()
            yield one
        finally:
            zygote.end_all(list(one.processes.values()), END_S)


def run_inside(
    pid: int, arguments: list[str], forks_ranks: bool = False, constants: Mapping[str, float] | None = None
) -> None:
    """Move this forked process to the host whose first process is `pid` and run Baton's command line.

    forks_ranks: its engine has ranks in processes of their own; constants: see zygote.prepare
    """
    netns.move_to(pid)
    if forks_ranks:
        fork_ranks()
    zygote.run_baton(arguments, constants=constants or {})


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
