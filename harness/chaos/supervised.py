"""A deployment that `baton up` runs and repairs. The harness only kills and watches."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml

from harness import zygote
from harness.chaos.site import LOOK_S, START_S, Site
from harness.chaos.victims import Part, Shape
from harness.support import free_port
from harness.zygote import Forked

AGAIN_S = 60.0  # timeout for a killed part to run again
END_S = 60.0  # timeout for the end of `baton up` and its parts


class Supervised(Part):
    """A child of `baton up`, across its restarts."""

    site: SupervisedSite

    async def restart(self) -> None:
        """Wait until `baton up` has restarted this part and, if it is a worker, reported it ready."""
        told = self.site.told(self.name, "ready: ")
        await self.found(other_than=self.pid)
        self.site.restarts[self.kind] += 1
        if self.is_worker:
            site, name = self.site, self.name
            await site.until(lambda: site.told(name, "ready: ") > told, START_S, f"{name} is ready")

    async def found(self, other_than: int = 0) -> None:
        def look() -> bool:
            self.pid = self.site.child(self.name, other_than) or self.pid
            return self.pid not in (0, other_than)

        await self.site.until(look, AGAIN_S, f"{self.name} runs")
        self.site.pids.add(self.pid)
        self.wanted, self.killed = True, False


class SupervisedSite(Site):
    def __init__(self, shape: Shape, folder: Path) -> None:
        super().__init__(shape, folder)
        self._up: Forked | None = None

    def told(self, name: str, text: str) -> int:
        """Return how often `baton up` has printed this about a part."""
        if self._up is None:
            return 0
        return sum(f"] {name} " in line and text in line for line in self._up.text.splitlines())

    def child(self, name: str, other_than: int) -> int:
        """Return the id of a part's process other than `other_than`, 0 if there is none."""
        if self._up is None:
            return 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self._up.pid).children():
                with contextlib.suppress(psutil.Error):
                    if one.pid != other_than and " ".join(one.cmdline()).strip() == f"baton {name}":
                        return one.pid
        return 0

    async def until(self, look: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait until `look` is true. Raises AssertionError after `within_s`, or if `baton up` has ended."""
        deadline = time.monotonic() + within_s
        while not look():
            if self._up is None or self._up.poll() is not None:
                raise AssertionError(f"baton up has ended: {self._up and self._up.text[-2000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within_s:g} s: {what}")
            await asyncio.sleep(LOOK_S)

    async def _start(self) -> None:
        port, shape = free_port(), self.shape
        self._addresses = [f"127.0.0.1:{free_port()}"]
        ops = {"listen": f"127.0.0.1:{free_port()}"}
        common = {**self._common(), "router": {"port": port, "drain_timeout_s": 30.0}, "ops": ops}
        config = self.folder / "baton.yaml"
        config.write_text(yaml.safe_dump(common))
        fleet = {"prefill": shape.prefill, "decode": shape.decode, "mixed": shape.mixed}
        line = ["up", *(word for kind, count in fleet.items() for word in (f"--{kind}", f"{count}"))]
        line += ["--log-dir", str(self.folder / "logs"), "--config", str(config)]
        self._up = zygote.shared().baton("up", line, self.folder, constants=self.shape.constants)
        up = self._up
        await self.until(lambda: "Ready." in up.text, START_S, "baton up is ready")
        names = {name: name for name in ("scheduler", "watcher", "router")}
        names |= {f"{kind}-{number}": kind for kind, count in fleet.items() for number in range(count)}
        for name, kind in names.items():
            part = Supervised(name, kind, common, self)
            self.parts.append(part)
            await part.found()
        await self._look_on()

    async def close(self) -> None:
        restarted = sum(self.told(part.name, "restarting") for part in self.parts)
        if restarted != self.restarts.total():
            self.crashes.append(f"baton up reported {restarted} restarts after {self.restarts.total()} kills")
        if self._up is not None:
            self._up.terminate()
            try:
                code = await asyncio.to_thread(self._up.wait, END_S)
            except subprocess.TimeoutExpired:
                self._up.kill()
                code = -9
            if code:
                self.crashes.append(f"baton up ended with {code}")
        self.parts.clear()  # all parts ended with `baton up`
        await super().close()

    async def mend(self) -> None:
        """Wait until `baton up` has repaired the site after a failed fault."""
        for part in self.parts:
            if not part.wanted:
                with contextlib.suppress(AssertionError):
                    await part.restart()

    def _bury(self) -> None:
        """Do nothing: `baton up` restarts parts, and `close` counts them."""
