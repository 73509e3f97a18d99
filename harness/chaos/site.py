"""The deployment under test: parts that the harness starts, breaks and mends itself, each a process.

`baton up` gives up a part that dies too often; here each may die as often as the plan wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio

from baton.handoff.memory import segments
from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc
from baton.services.config import SchedulerSettings
from baton.services.fleet import devices
from baton.services.leave import ENGINE_FAILED
from harness import zygote
from harness.chaos.parts import WORKER_KINDS
from harness.chaos.proxy import Proxy
from harness.deployment import ENGINE
from harness.scheduling import RedisServer
from harness.support import free_port

START_S = 120.0  # until all parts are ready, on a busy machine
DRAIN_S = 60.0  # of a router: batch work may wait for its `patience_s` of 30 s, and for its turn
END_S = DRAIN_S + 15  # until a part that drains has ended
LOOK_S = 0.05  # between two calls of the scheduler
SELDOM_S = 0.5  # the same without workers: no stage of a request has to be met
MOST_CRASHES = 10  # of all parts; what crashes then stays dead
CALL_S = 1.0  # deadline of one look


@dataclass(frozen=True)
class Shape:
    """The shape of a deployment."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    routers: int = 1
    processes: int = 1  # of each router
    schedulers: int = 1
    redis: bool = False
    proxied: bool = False  # a proxy that can delay and drop is before each worker
    speculation: dict[str, Any] | None = None
    lease_s: float = 3.0  # of workers
    hold_lease_s: float = 6.0  # of placements; KV that waits to be pulled is held twice as long
    staging_mib: int = 128
    slots: int = ENGINE["max_num_seqs"]  # of each engine's batch
    queue_factor: float = SchedulerSettings().max_queue_factor
    poison: bool = False  # engines break under marked requests (harness/poison)
    supervised: bool = False  # by `baton up`, which starts all parts and mends them: supervised.py

    @property
    def name(self) -> str:
        if not self.prefill + self.decode + self.mixed:
            return "no engines"
        mixed = f"+{self.mixed}M" if self.mixed else ""
        return f"{self.prefill}P{self.decode}D{mixed}"

    @property
    def lease_limit_s(self) -> float:
        """The longest lease, in seconds."""
        return max(self.lease_s, 2 * self.hold_lease_s)


@dataclass(eq=False)
class Part:
    """A process that should run, through all its restarts."""

    name: str
    kind: str
    settings: dict[str, Any]
    site: Site = field(repr=False)
    proxy: Proxy | None = None
    pid: int = 0
    wanted: bool = False  # it should be alive: if it is not, it has crashed
    away: bool = True  # it cannot be counted on now
    hung_since: float = 0.0  # time.monotonic; 0: it is not
    hung_times: list[tuple[float, float]] = field(default_factory=list)  # that are over
    killed: bool = False  # and not started again yet

    @property
    def worker_id(self) -> str:
        """The worker id of the running process; see harness/chaos/parts.py."""
        return f"{self.name}.{self.pid}"

    @property
    def is_worker(self) -> bool:
        return self.kind in WORKER_KINDS

    def start(self) -> None:
        """Start the process; `Site.whole` waits until it serves."""
        settings = self.settings
        if self.is_worker:
            port = free_port()
            own = {**settings["worker"], "worker_id": self.name, "listen": f"127.0.0.1:{port}"}
            if self.proxy is not None:
                self.proxy.target = port
                own["advertise"] = f"127.0.0.1:{self.proxy.port}"
            settings = {**settings, "worker": own}
        self.pid = (
            zygote.shared()
            .start(
                self.name,
                "harness.chaos.parts:run",
                self.site.folder,
                kind=self.kind,
                settings=settings,
                poison=self.site.shape.poison,
            )
            .pid
        )
        self.site.pids.add(self.pid)
        self.wanted = True
        self.killed = False

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
        """Ask the process to end; `ended` waits for it."""
        self.leave()
        self.signal(signal.SIGTERM)

    def leave(self) -> None:
        """Note that the process's end is expected, and is no crash."""
        self.gone()
        self.wanted = False

    async def ended(self, within_s: float = END_S) -> int:
        """Wait for its exit code, negative for a signal. Kill it and raise AssertionError when it is late."""
        deadline = time.monotonic() + within_s
        while (code := zygote.shared().ended([self.pid]).get(self.pid)) is None:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"{self.name} did not end within {within_s:g} s of SIGTERM")
            await asyncio.sleep(0.05)
        return code

    async def restart(self) -> None:
        """Start the process again after its end."""
        await self.ended()
        self.start()
        self.site.restarts[self.kind] += 1

    def gone(self) -> None:
        self.away = True
        self.site.note_cover()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Site:
    """The deployment, an asynchronous context: everything that it started ends with it."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.folder = folder
        self.parts: list[Part] = []
        self.pids: set[int] = set()  # of all restarts
        self.redis: RedisServer | None = None
        self.guests: set[str] = set()  # ids of workers that are no parts, and must be ready, too
        self.restarts: Counter[str] = Counter()
        self.crashes: list[str] = []  # parts that ended unexpectedly
        self.engines_failed = 0  # processes that ended with their engine, where that is expected
        self.uncovered: list[tuple[float, float]] = []  # times without a worker; time.monotonic
        self._uncovered_since = 0.0  # 0: there is a worker
        self.description: pb.Description | None = None  # the last from a scheduler
        self.live: dict[str, tuple[str, str]] = {}  # attempt's request id -> its prefill and decode worker
        self.most_booked = 0  # requests at one decode worker
        self._addresses: list[str] = []
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[scheduler_pb2_grpc.SchedulerStub] = []
        self._http: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None

    # -- parts

    def of(self, *kinds: str) -> list[Part]:
        return [part for part in self.parts if part.kind in kinds]

    @property
    def workers(self) -> list[Part]:
        return self.of(*WORKER_KINDS)

    @property
    def _look_s(self) -> float:
        return LOOK_S if self.workers else SELDOM_S

    @property
    def routers(self) -> list[Part]:
        return self.of("router")

    @property
    def scheduler_address(self) -> str:
        """The scheduler's address for clients: one, or several separated by commas."""
        return ",".join(self._addresses)

    @property
    def target_urls(self) -> list[str]:
        """The schedulers' lists of what Prometheus can scrape, also while they are away."""
        ports = (one.settings["scheduler"]["metrics_port"] for one in self.of("scheduler"))
        return [f"http://127.0.0.1:{port}/targets" for port in ports]

    def url(self, router: Part) -> str:
        return f"http://127.0.0.1:{router.settings['router']['port']}"

    @property
    def live_page(self) -> str:
        """The URL of the live page at a router that can be counted on now."""
        router = next(part for part in self.routers if not part.away)
        return f"http://{router.settings['ops']['listen']}/ops"

    def note_cover(self) -> None:
        """Note that a part has gone or come back: keeps the times in which no worker can serve."""
        now = time.monotonic()
        covered = any(not part.away for part in self.workers)
        if covered and self._uncovered_since:
            self.uncovered.append((self._uncovered_since, now))
            self._uncovered_since = 0.0
        elif not covered and not self._uncovered_since:
            self._uncovered_since = now

    def uncovered_until(self, now: float) -> list[tuple[float, float]]:
        """Return the times in which no worker could serve, the one that still lasts included."""
        return self.uncovered + ([(self._uncovered_since, now)] if self._uncovered_since else [])

    # -- life

    async def __aenter__(self) -> Site:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S))
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self) -> None:
        shape = self.shape
        if shape.redis:
            self.redis = RedisServer(self.folder, extra=("--appendonly", "yes"))
            await asyncio.to_thread(self.redis.start)
        self._addresses = [f"127.0.0.1:{free_port()}" for _ in range(shape.schedulers)]
        common = self._common()
        for number, address in enumerate(self._addresses):
            scheduler = {**common["scheduler"], "address": address, "metrics_port": free_port()}
            own = {"engine": {}, "handoff": {}, "scheduler": scheduler}
            self.parts.append(Part(f"scheduler-{number}", "scheduler", {**common, **own}, self))
        kinds = ["prefill"] * shape.prefill + ["decode"] * shape.decode + ["mixed"] * shape.mixed
        places = devices.assign([1] * len(kinds)) if kinds else []
        for number, (kind, where) in enumerate(zip(kinds, places, strict=True)):
            name = f"{kind}-{kinds[:number].count(kind)}"
            worker = {"cpu": where.cpu}
            part = Part(name, kind, {**common, "worker": worker}, self)
            if shape.proxied:
                part.proxy = Proxy()
                await part.proxy.start()
            self.parts.append(part)
        for number in range(shape.routers):
            settings = {
                **common,
                "router": {
                    "port": free_port(),
                    "processes": shape.processes,
                    "drain_timeout_s": DRAIN_S,
                },
                "ops": {"listen": f"127.0.0.1:{free_port()}"},
            }
            self.parts.append(Part(f"router-{number}", "router", settings, self))
        for part in self.parts:
            part.start()
        await self._look_on()

    def _common(self) -> dict[str, Any]:
        """Return the settings of all parts."""
        shape = self.shape
        return {
            "engine": {
                **ENGINE,
                "max_num_batched_tokens": 256,
                "max_num_seqs": shape.slots,
                "speculative_config": shape.speculation,
            },
            "scheduler": {
                "address": self.scheduler_address,
                "store": self.redis.url if self.redis else "memory",
                "worker_lease_s": shape.lease_s,
                "heartbeat_s": shape.lease_s / 6,
                "placement_lease_s": shape.hold_lease_s,
                "max_queue_factor": shape.queue_factor,
            },
            "handoff": {"staging_mib": shape.staging_mib},
        }

    async def _look_on(self) -> None:
        """Begin to watch the parts, and wait until all serve."""
        for address in self._addresses:
            channel = grpc.aio.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 200)])
            self._channels.append(channel)
            self._stubs.append(scheduler_pb2_grpc.SchedulerStub(channel))  # type: ignore[no-untyped-call]
        self._watching = asyncio.create_task(self._watch(), name="watch the site")
        await self.whole(START_S)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        started = [part for part in self.parts if part.pid]
        for part in started:
            part.wanted = False
            with contextlib.suppress(ProcessLookupError):
                part.signal(signal.SIGCONT)
                part.signal(signal.SIGTERM)
        for part in started:
            with contextlib.suppress(AssertionError):
                await part.ended(20)
        for part in self.parts:
            if part.proxy is not None:
                await part.proxy.close()
        for channel in self._channels:
            await channel.close(None)
        if self._http is not None:
            await self._http.close()
        if self.redis is not None:
            self.redis.stop()

    async def mend(self) -> None:
        """Repair what a fault left behind that failed."""
        for part in self.parts:
            if part.hung:
                part.wake()
            if part.proxy is not None:
                part.proxy.mend()
            if not part.wanted:
                with contextlib.suppress(ProcessLookupError):
                    part.signal(signal.SIGKILL)
                await part.restart()
        if self.redis is not None:
            self.redis.stop()
            await asyncio.to_thread(self.redis.start)

    def segments_left(self) -> list[str]:
        """Return the shared memory of this site's processes; after `close` there must be none."""
        ours = {str(pid) for pid in self.pids}
        return [
            path.name for path in segments.DIRECTORY.glob("baton-kv-*") if path.name.split("-")[2] in ours
        ]

    # -- what is known

    async def describe(self) -> pb.Description | None:
        """Return the description by the first scheduler that answers; None when none does."""
        for stub in self._stubs:
            with contextlib.suppress(grpc.RpcError):
                description: pb.Description = await stub.Describe(pb.DescribeRequest(), timeout=CALL_S)
                return description
        return None

    async def describe_each(self) -> list[pb.Description | None]:
        """Return each scheduler's description; None for one that does not answer."""
        calls = (stub.Describe(pb.DescribeRequest(), timeout=CALL_S) for stub in self._stubs)
        found = await asyncio.gather(*calls, return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, grpc.RpcError):
                raise one
        return [one if isinstance(one, pb.Description) else None for one in found]

    async def whole(self, within_s: float) -> float:
        """Wait until each part serves and the store is in use. Return the seconds that took.

        Raises AssertionError with what is missing.
        """
        began = time.monotonic()
        while missing := await self._missing():
            if time.monotonic() > began + within_s:
                raise AssertionError(f"not whole after {within_s:g} s: {', '.join(missing)}")
            await asyncio.sleep(self._look_s)
        return time.monotonic() - began

    def status(self, worker: Part) -> pb.WorkerStatus | None:
        """Return the running worker as a scheduler described it last; None where it is not known."""
        known = self.description.workers if self.description is not None else []
        return next((one for one in known if one.identity.worker_id == worker.worker_id), None)

    async def held(self, worker: Part) -> None:
        """Wait until a worker has loaded its engine and is drained. Raises AssertionError if it never is."""
        deadline = time.monotonic() + START_S
        while not ((one := self.status(worker)) and one.drained and one.identity.HasField("capacity")):
            if time.monotonic() > deadline:
                raise AssertionError(f"{worker.worker_id} is not there, drained, after {START_S:g} s: {one}")
            await asyncio.sleep(LOOK_S)

    async def _missing(self) -> list[str]:
        missing = [part.name for part in self.parts if part.hung or not part.wanted]
        for part, description in zip(self.of("scheduler"), await self.describe_each(), strict=True):
            if description is None:
                missing.append(part.name)
                continue
            part.away = False
            missing += [f"{part.name}: {description.store_problem}"] if description.store_problem else []
            ready = self._note_ready(description)
            missing += [
                f"{worker.name} at {part.name}" for worker in self.workers if worker.worker_id not in ready
            ]
            missing += [f"{worker_id} at {part.name}" for worker_id in sorted(self.guests - ready)]
        for router in self.routers:
            if await self._healthy(router):
                router.away = False
            else:
                missing.append(router.name)
        return missing

    def _note_ready(self, description: pb.Description) -> set[str]:
        ready = {
            one.identity.worker_id
            for one in description.workers
            if one.state == pb.WORKER_STATE_READY and one.heartbeat_age_s < self.shape.lease_s
        }
        for worker in self.workers:
            if worker.wanted and not worker.hung and worker.worker_id in ready:
                worker.away = False
        self.note_cover()
        return ready

    async def _healthy(self, router: Part) -> bool:
        if self._http is None:
            raise RuntimeError("the site has not begun")
        try:
            async with self._http.get(f"{self.url(router)}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def metrics(self) -> dict[str, float]:
        """Return the sums of all running routers' metrics: name with labels -> value."""
        found: dict[str, float] = {}
        for router in self.routers:
            if self._http is None:
                break
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self.url(router)}/metrics") as answer:
                    for line in (await answer.text()).splitlines():
                        name, _, value = line.rpartition(" ")
                        if name.startswith("baton_router_"):
                            found[name] = found.get(name, 0.0) + float(value)
        return found

    async def keep_records(self) -> None:
        """Write what each router tells of its last requests, beside its log: a pause needs a reason."""
        if self._http is None:
            return
        for router in self.routers:
            url = f"http://{router.settings['ops']['listen']}/ops/requests?n=200"
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(url) as answer:
                    (self.folder / f"{router.name}-requests.json").write_bytes(await answer.read())

    async def _watch(self) -> None:
        """Keep the scheduler's description, and restart what crashed, for ever: run as a task."""
        while True:
            description = await self.describe()
            if description is not None:
                self.description = description
                self._note_ready(description)
                writers = [one for one in description.workers if one.identity.role != pb.ROLE_PREFILL]
                self.most_booked = max([self.most_booked, *(one.reserved_requests for one in writers)])
                self.live = {
                    one.attempt.request_id: (one.prefill_worker_id, one.decode_worker_id)
                    for one in description.attempts
                }
            self._bury()
            await asyncio.sleep(self._look_s)

    def _bury(self) -> None:
        wanted = {part.pid: part for part in self.parts if part.wanted and part.pid}
        for pid, code in zygote.shared().ended(list(wanted)).items():
            part = wanted[pid]
            if self.shape.poison and code == ENGINE_FAILED:
                self.engines_failed += 1
                part.gone()
                part.start()
                self.restarts[part.kind] += 1
                continue
            self.crashes.append(f"{part.worker_id} ended by itself with {code}")
            part.gone()
            if len(self.crashes) > MOST_CRASHES:
                part.wanted = False
                continue
            part.start()
            self.restarts[part.kind] += 1
