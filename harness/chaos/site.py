"""The deployment under test.

Unlike under `baton up`, a part may die any number of times.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio

from baton.handoff.memory import segments
from baton.protos import scheduler_pb2 as pb
from baton.protos import scheduler_pb2_grpc
from baton.services.fleet import devices
from baton.services.leave import ENGINE_FAILED
from harness import zygote
from harness.architectures.experts import glm4_moe
from harness.architectures.registry import VISIONS
from harness.chaos.proxy import Proxy
from harness.chaos.victims import DRAIN_S, Part, Shape
from harness.deployment import ENGINE
from harness.forked import WORKER_KINDS
from harness.scheduling import RedisServer
from harness.support import free_port

START_S = 120.0  # timeout for all parts to be ready, on a busy machine
LOOK_S = 0.05  # the time between polls of the scheduler
SELDOM_S = 0.5  # the time between polls without workers: no fault waits for a stage
MOST_CRASHES = 10  # after this many, crashed parts stay dead
CALL_S = 1.0  # timeout of a poll


class Site:
    """The deployment, an async context manager."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.folder = folder
        self.parts: list[Part] = []
        self.pids: set[int] = set()  # all processes, past and present
        self.redis: RedisServer | None = None
        self.guests: set[str] = set()  # ids of other workers that must also be ready
        self.restarts: Counter[str] = Counter()
        self.crashes: list[str] = []  # parts that ended unexpectedly
        self.engines_failed = 0  # processes that ended with their engine, if poison is on
        self.uncovered: list[tuple[float, float]] = []  # past times without a worker; time.monotonic
        self._uncovered_since = 0.0  # 0: there is a worker
        self.description: pb.Description | None = None  # the latest from any scheduler
        self.live: dict[str, tuple[str, str]] = {}  # attempt's request id -> prefill and decode worker
        self.most_booked = 0  # highest number of requests on one decode worker
        self.engine: dict[str, Any] = {}  # settings of all engines, besides the shape's
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
    def routers(self) -> list[Part]:
        return self.of("router")

    @property
    def scheduler_address(self) -> str:
        """The schedulers' addresses, separated by commas."""
        return ",".join(self._addresses)

    @property
    def target_urls(self) -> list[str]:
        """The schedulers' http_sd URLs for Prometheus."""
        ports = (one.settings["scheduler"]["metrics_port"] for one in self.of("scheduler"))
        return [f"http://127.0.0.1:{port}/targets" for port in ports]

    def url(self, router: Part) -> str:
        return f"http://127.0.0.1:{router.settings['router']['port']}"

    def note_cover(self) -> None:
        """Update the times in which no worker can serve. Called when a part goes or comes back."""
        now = time.monotonic()
        covered = any(not part.away for part in self.workers if part.kind != "encode")
        if covered:
            self.uncovered, self._uncovered_since = self.uncovered_until(now), 0.0
        else:
            self._uncovered_since = self._uncovered_since or now

    def uncovered_until(self, now: float) -> list[tuple[float, float]]:
        """Return the times in which no worker could serve, including the current one."""
        return self.uncovered + ([(self._uncovered_since, now)] if self._uncovered_since else [])

    # -- life cycle

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
        kinds += ["encode"] * shape.encode
        shares = iter(devices.assign([1] * len(kinds) * shape.gang) if kinds else [])
        for number, kind in enumerate(kinds):
            place = f"{kind}-{kinds[:number].count(kind)}"
            for rank in range(shape.gang):
                gang = {"gang": f"{place}/{rank}"} if shape.gang > 1 else {}
                own = {"worker": {"cpu": next(shares).cpu, **gang}}
                name = f"{place}.r{rank}" if gang else place
                part = Part(name, kind, common | own, self, Proxy() if shape.proxied else None)
                if part.proxy is not None:
                    await part.proxy.start()
                self.parts.append(part)
        for number in range(shape.routers):
            router = {
                "port": free_port(),
                "processes": shape.processes,
                "drain_timeout_s": DRAIN_S,
                "media": {"encode_min_tokens": 1},
            }
            own = {"router": router, "ops": {"listen": f"127.0.0.1:{free_port()}"}}
            self.parts.append(Part(f"router-{number}", "router", common | own, self))
        for part in self.parts:
            part.start()
        await self._look_on()

    def _common(self) -> dict[str, Any]:
        shape = self.shape
        self.engine = dict(ENGINE)
        if shape.gang > 1:
            glm4_moe(self.folder / "model")
            gang = {"data_parallel_size": shape.gang, "expert_parallel": True}
            self.engine |= {"model": str(self.folder / "model"), "tool_call_parser": None, **gang}
        if shape.encode:
            sees = VISIONS["qwen2.5-vl"]
            self.engine |= {"model": str(sees.target(sees.checkpoint())), "tool_call_parser": None}
        return {
            "engine": {
                **self.engine,
                "max_num_batched_tokens": 256,
                "max_num_seqs": shape.slots,
                "speculative_config": shape.speculation,
            },
            "scheduler": {
                "address": self.scheduler_address,
                "store": self.redis.url if self.redis else "memory",
                "worker_lease_s": shape.lease_s,
            },
            "handoff": {"staging_mib": shape.staging_mib},
        }

    async def _look_on(self) -> None:
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
        """Repair the site after a failed fault."""
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
        """Return the shared memory files of this site's processes; `close` should leave none."""
        names = (path.name for path in segments.DIRECTORY.glob("baton-kv-*"))
        return [name for name in names if int(name.split("-")[2]) in self.pids]

    # -- observation

    async def describe(self) -> pb.Description | None:
        """Return the description of the first scheduler that answers."""
        for stub in self._stubs:
            if (description := await _describe(stub)) is not None:
                return description
        return None

    async def describe_each(self) -> list[pb.Description | None]:
        """Return each scheduler's description; None for one that does not answer."""
        return list(await asyncio.gather(*map(_describe, self._stubs)))

    async def whole(self, within_s: float) -> None:
        """Wait until all parts serve and the store works. Raises an AssertionError that names what fails."""
        deadline = time.monotonic() + within_s
        while missing := await self._missing():
            if time.monotonic() > deadline:
                raise AssertionError(f"not whole after {within_s:g} s: {', '.join(missing)}")
            await asyncio.sleep(LOOK_S if self.workers else SELDOM_S)

    def status(self, worker: Part) -> pb.WorkerStatus | None:
        """Return a worker's status in the latest description."""
        known = self.description.workers if self.description is not None else []
        return next((one for one in known if one.identity.worker_id == worker.worker_id), None)

    async def held(self, worker: Part) -> None:
        """Wait until a worker has loaded its engine and is drained. Raises AssertionError after START_S."""
        deadline = time.monotonic() + START_S
        while not ((one := self.status(worker)) and one.drained and one.identity.HasField("capacity")):
            if time.monotonic() > deadline:
                raise AssertionError(f"{worker.worker_id} is not drained after {START_S:g} s: {one}")
            await asyncio.sleep(LOOK_S)

    async def _missing(self) -> list[str]:
        missing = [part.name for part in self.parts if part.hung or not part.wanted]
        for part, description in zip(self.of("scheduler"), await self.describe_each(), strict=True):
            if description is None:
                missing.append(part.name)
                continue
            part.away = False
            if description.store_problem:
                missing.append(f"{part.name}: {description.store_problem}")
            wanted = {worker.worker_id for worker in self.workers} | self.guests
            missing += [f"{one} at {part.name}" for one in sorted(wanted - self._note_ready(description))]
        for router in self.routers:
            if (await self._get(f"{self.url(router)}/health"))[0] == 200:
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
            if all(one.wanted and not one.hung and one.worker_id in ready for one in worker.gang):
                worker.away = False
        self.note_cover()
        return ready

    async def _get(self, url: str) -> tuple[int, bytes]:
        """Return the status and body of a GET; without an answer, the status is 0."""
        if self._http is None:
            raise RuntimeError("the site is not entered")
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._http.get(url) as answer:
                return answer.status, await answer.read()
        return 0, b""

    async def metrics(self) -> dict[str, float]:
        """Return all routers' metrics, summed by name and labels."""
        found: dict[str, float] = defaultdict(float)
        for router in self.routers:
            _, body = await self._get(f"{self.url(router)}/metrics")
            for line in body.decode().splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith("baton_router_"):
                    found[name] += float(value)
        return found

    async def keep_records(self) -> None:
        """Write each router's records of its last requests next to its log, to explain pauses."""
        for router in self.routers:
            _, body = await self._get(f"http://{router.settings['ops']['listen']}/ops/requests?n=200")
            (self.folder / f"{router.name}-requests.json").write_bytes(body)

    async def _watch(self) -> None:
        """Keep the description up to date and restart crashed parts until cancelled."""
        while True:
            description = await self.describe()
            if description is not None:
                self.description = description
                self._note_ready(description)
                roles = pb.ROLE_DECODE, pb.ROLE_MIXED
                decode = [one for one in description.workers if one.identity.role in roles]
                self.most_booked = max([self.most_booked, *(one.reserved_requests for one in decode)])
                self.live = {
                    one.attempt.request_id: (one.prefill_worker_id, one.decode_worker_id)
                    for one in description.attempts
                }
            self._bury()
            await asyncio.sleep(LOOK_S if self.workers else SELDOM_S)

    def _bury(self) -> None:
        wanted = {part.pid: part for part in self.parts if part.wanted and part.pid}
        for pid, code in zygote.shared().ended(list(wanted)).items():
            part = wanted[pid]
            fell = part.fell
            part.gone()
            if self.shape.poison and code == ENGINE_FAILED:
                self.engines_failed += 1
            elif not (fell and code in (0, ENGINE_FAILED)):
                self.crashes.append(f"{part.worker_id} ended by itself with {code}")
            if len(self.crashes) > MOST_CRASHES:
                part.wanted = False
                continue
            part.start()
            self.restarts[part.kind] += 1


async def _describe(stub: scheduler_pb2_grpc.SchedulerStub) -> pb.Description | None:
    with contextlib.suppress(grpc.RpcError):
        description: pb.Description = await stub.Describe(pb.DescribeRequest(), timeout=CALL_S)
        return description
    return None
