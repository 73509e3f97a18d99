"""The shape of a deployment, and its processes, which the harness starts, kills, hangs and drains."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.services.config import SchedulerSettings
from harness import poison, zygote
from harness.chaos.proxy import Proxy
from harness.deployment import ENGINE
from harness.forked import WORKER_KINDS
from harness.support import free_port

if TYPE_CHECKING:
    from harness.chaos.site import Site

DRAIN_S = 60.0  # limit for a router: batch work may wait for longer than its `patience_s` of 30 s
END_S = DRAIN_S + 15  # timeout for the end of a draining part


@dataclass(frozen=True)
class Shape:
    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    encode: int = 0  # if not 0, half of the questions have images
    routers: int = 1
    processes: int = 1  # per router
    schedulers: int = 1
    redis: bool = False
    proxied: bool = False  # put a proxy that can delay and drop bytes in front of each worker
    speculation: dict[str, Any] | None = None
    lease_s: float = 3.0
    hold_lease_s: float = 6.0  # lease of placements; saved KV is held twice as long
    staging_mib: int = 128
    slots: int = ENGINE["max_num_seqs"]  # per engine
    queue_factor: float = SchedulerSettings().max_queue_factor
    poison: bool = False  # load the plug-in of harness/poison
    gang: int = 1  # workers of each place; a gang computes a mixture of experts
    supervised: bool = False  # let `baton up` start and repair all parts (supervised.py)

    @property
    def name(self) -> str:
        if not self.prefill + self.decode + self.mixed:
            return "no engines"
        encode = f"{self.encode}E" if self.encode else ""
        mixed = f"+{self.mixed}M" if self.mixed else ""
        gangs = f" (gangs of {self.gang})" if self.gang > 1 else ""
        return f"{encode}{self.prefill}P{self.decode}D{mixed}{gangs}"

    @property
    def constants(self) -> dict[str, float]:
        """Constants of the product, for zygote.prepare."""
        module = SchedulerSettings.__module__
        return {
            f"{module}:PLACEMENT_LEASE": self.hold_lease_s / self.lease_s,
            f"{module}:MAX_QUEUE_FACTOR": self.queue_factor,
        }

    @property
    def lease_limit_s(self) -> float:
        """The longest lease, in seconds."""
        return max(self.lease_s, 2 * self.hold_lease_s)


@dataclass(eq=False)
class Part:
    name: str
    kind: str
    settings: dict[str, Any]
    site: Site = field(repr=False)
    proxy: Proxy | None = None
    pid: int = 0
    wanted: bool = False  # should be alive; if it is not, it crashed
    away: bool = True  # may not be able to serve
    hung_since: float = 0.0  # time.monotonic; 0: not hung
    hung_times: list[tuple[float, float]] = field(default_factory=list)  # past hangs
    killed: bool = False  # killed and not restarted yet
    started_at: float = 0.0  # time.monotonic, like gone_at
    gone_at: float = 0.0

    @property
    def worker_id(self) -> str:
        """The running process's worker id; see harness/forked.py."""
        return f"{self.name}.{self.pid}"

    @property
    def gang(self) -> list[Part]:
        """The workers of its gang, or itself alone."""
        name = self.settings.get("worker", {}).get("gang", "").partition("/")[0]
        if not (self.is_worker and name):
            return [self]
        return [one for one in self.site.workers if one.settings["worker"]["gang"].partition("/")[0] == name]

    @property
    def fell(self) -> bool:
        """Whether it has to end, because a member of its gang ended while it was running."""
        return any(one.gone_at > self.started_at for one in self.gang)

    @property
    def is_worker(self) -> bool:
        return self.kind in WORKER_KINDS

    def start(self) -> None:
        """Start the process; `Site.whole` waits until it serves."""
        settings = self.settings
        if self.is_worker:
            port = free_port()
            own = {"worker_id": self.name, "listen": f"127.0.0.1:{port}"}
            if self.proxy is not None:
                self.proxy.target = port
                own["advertise"] = f"127.0.0.1:{self.proxy.port}"
            settings = {**settings, "worker": settings["worker"] | own}
        path = str(poison.FOLDER) if self.site.shape.poison else ""
        shape = self.site.shape.constants
        what = {"kind": self.kind, "settings": settings, "path": path, "constants": shape}
        self.pid = zygote.shared().start(self.name, "harness.forked:run", self.site.folder, **what).pid
        self.site.pids.add(self.pid)
        self.wanted, self.killed, self.started_at = True, False, time.monotonic()

    def kill(self) -> None:
        self.leave()
        self.killed = True
        self.signal(signal.SIGKILL)

    def hang(self) -> None:
        self.gone()
        self.hung_since = time.monotonic()
        self.signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.signal(signal.SIGCONT)
        self.hung_times.append((self.hung_since, time.monotonic()))
        self.hung_since = 0.0

    @property
    def hung(self) -> bool:
        return self.hung_since > 0.0

    def drain(self) -> None:
        """Send SIGTERM; `ended` waits for the end."""
        self.leave()
        self.signal(signal.SIGTERM)

    def leave(self) -> None:
        """Expect the process to end, so that this does not count as a crash."""
        self.gone()
        self.wanted = False

    async def ended(self, within_s: float = END_S) -> int:
        """Wait for its exit code, negative for a signal. Raises AssertionError if it has to be killed."""
        deadline = time.monotonic() + within_s
        while (code := zygote.shared().ended([self.pid]).get(self.pid)) is None:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"{self.name} did not end within {within_s:g} s of SIGTERM")
            await asyncio.sleep(0.05)
        return code

    async def restart(self) -> None:
        await self.ended()
        self.start()
        self.site.restarts[self.kind] += 1

    def gone(self) -> None:
        self.gone_at = time.monotonic()
        for one in self.gang:
            one.away = True
        self.site.note_cover()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
