"""Baton as an application of Ray Serve, in place of `ray.serve.llm.build_pd_openai_app`.

Serve starts replicas, checks their health, scales them, and drains those that it removes. Each replica owns a
`baton node` that runs one part, or one gang of workers:

    Scheduler         one replica
    Prefill, Decode   one worker or gang per replica; Serve sends it no requests, but is told how many it has
    Router            the ingress: one router per replica, and a proxy that forwards Serve's requests to it

The scheduler's replica is also the parts' CA: the others ask it for the scheduler's address and for tokens,
which are valid as long as that replica lives.

Uses, of Ray Serve 2.60, a replica's check_health, __del__ (awaited, within graceful_shutdown_timeout_s) and
record_autoscaling_stats, and AutoscalingConfig.policy.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from baton import addresses
from baton.protos import scheduler_pb2 as pb
from baton.scheduler.client import SchedulerClient
from baton.scheduler.errors import SchedulerError
from baton.security.names import Role
from baton.services import identities
from baton.services.config import Settings
from baton.services.errors import StartError
from baton.services.fleet.devices import VISIBLE
from baton.services.fleet.node import PartOrder
from baton.services.fleet.parts import STOP_TIMEOUT_S
from baton.services.fleet.watch import healthy
from baton.services.ray import cluster, serve_args
from baton.services.ray.config import WORKER_ROLES, ClusterSettings
from baton.services.ray.gangs import members_of
from baton.services.ray.keeper import Keeper
from baton.services.ray.proxy import Proxy
from baton.services.ray.trust import Trust

START_S = 600.0
POLL_S = 0.2
UNBOUNDED = (
    1_000_000  # requests in one ingress replica; Serve's default is 5, Baton's router has its own limits
)
_REQUESTS = "requests"  # a worker's metric for Serve's autoscaling


@dataclass(frozen=True)
class Meeting:
    """The scheduler replica's answer to another replica: the scheduler's address, and how to join."""

    address: str
    part: dict[str, Any]  # the section `security` for the replica's part
    operator: dict[str, Any]  # the same for the replica itself, which queries the scheduler


class _Part:
    """A replica that runs one part of the deployment."""

    def __init__(self, role: str, tree: Mapping[str, Any]) -> None:
        self._keeper = Keeper("", os.getcwd())
        self._host = cluster.machines(loopback=False)[cluster.here()].address
        self._role = role
        self._name = f"{role}-{serve.get_replica_context().replica_id.unique_id}"
        self._tree: dict[str, Any] = copy.deepcopy(dict(tree))
        self._members = [self._name]  # or the names of a gang's workers
        self._drain_s = STOP_TIMEOUT_S
        self._scheduler: SchedulerClient | None = None

    async def _meet(self, scheduler: Any) -> None:
        """Learn the scheduler's address, and take on this replica's identity. Raises SecurityError."""
        met: Meeting = await scheduler.meet.remote(self._role)
        self._tree["scheduler"]["address"] = met.address
        self._tree["security"] = met.part
        # The part takes its own identity from its settings; this process acts as an operator.
        mine = Settings(**{**self._tree, "security": met.operator})
        await asyncio.to_thread(identities.take_on, mine, Role.OPERATOR)
        self._scheduler = SchedulerClient(met.address)

    async def _workers(self) -> list[pb.WorkerStatus] | None:
        """Return the part's workers, or None if the scheduler does not answer."""
        try:
            description = await cast(SchedulerClient, self._scheduler).describe()
        except SchedulerError:
            return None
        return [one for one in description.workers if one.identity.name in self._members]

    async def _run(self, cores: int, ready: Callable[[], Awaitable[bool]]) -> None:
        """Start the part and wait until it is ready. Raises StartError."""
        gpus = {name: os.environ[name] for name in (VISIBLE,) if name in os.environ}
        part = PartOrder(self._name, self._role, self._tree, gpus, cores)
        self._drain_s = part.end_s
        parts = members_of(part) if self._role in WORKER_ROLES else [part]
        self._members = [one.name for one in parts]
        self._keeper.run(0, [one.to_json() for one in parts])
        said: list[str] = []
        async with asyncio.timeout(START_S):
            while not await ready():
                report = self._keeper.report()
                said += [f"{name}: {text}" for name, text in report.said]
                if report.failed or "given up" in report.states.values():
                    raise StartError(f"{self._name} cannot start: {report.failed or said[-1]}")
                await asyncio.sleep(POLL_S)

    def check_health(self) -> None:
        """Raise if the part, or a worker of its gang, was given up, so that Serve replaces this replica."""
        report = self._keeper.report()
        if report.failed or "given up" in map(report.states.get, self._members):
            raise RuntimeError(f"{self._name} is gone: {report.failed or 'it died too often'}")

    async def __del__(self) -> None:
        """Drain the part and end it."""
        self._keeper.run(1, [])
        deadline = time.monotonic() + self._drain_s
        while self._keeper.report().states and time.monotonic() < deadline:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(POLL_S)
        self._keeper.end()
        if self._scheduler:
            await self._scheduler.close()


class Scheduler(_Part):
    def __init__(self, tree: Mapping[str, Any]) -> None:
        super().__init__("scheduler", tree)
        self._address = addresses.join(self._host, self._keeper.port(self._host))
        self._tree["scheduler"]["address"] = self._address
        self._trust = Trust(Settings(**self._tree), self._host)
        self._started: asyncio.Task[None] | None = None

    async def meet(self, part: str) -> Meeting:
        """Wait until the scheduler listens, and return what a replica needs to join."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        await self._started
        return Meeting(self._address, self._trust.section(part), self._trust.section(Role.OPERATOR))

    async def __del__(self) -> None:
        """End the scheduler, then its CA."""
        await super().__del__()
        await self._trust.__aexit__(None, None, None)

    async def _start(self) -> None:
        await self._trust.__aenter__()
        self._tree["security"] = self._trust.section(self._role)
        self._scheduler = SchedulerClient(self._address)
        await self._run(0, self._answers)

    async def _answers(self) -> bool:
        return await self._workers() is not None


class Worker(_Part):
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, role: str, tree: Mapping[str, Any], cores: int, scheduler: Any
    ) -> None:
        super().__init__(role, tree)
        await self._meet(scheduler)
        self._tree["worker"]["listen"] = addresses.join(self._host, 0)
        await self._run(cores, self._is_ready)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many requests are placed on this worker or gang."""
        return {_REQUESTS: float(sum(one.reserved_requests for one in await self._workers() or ()))}

    async def _is_ready(self) -> bool:
        found = await self._workers() or ()
        ready = [one for one in found if one.state == pb.WORKER_STATE_READY]
        return len(ready) == len(self._members)


class Router(_Part):
    """The ingress: a replica that runs one router and forwards every request to it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, tree: Mapping[str, Any], port: int | None, scheduler: Any, *workers: Any
    ) -> None:
        """Listen on this port, or a free one. `workers` are unused: Serve starts only what is bound."""
        del workers
        super().__init__("router", tree)
        port = port or self._keeper.port(self._host)
        self._url = f"http://{addresses.join(self._host, port)}"
        self._proxy = Proxy(self._url, Settings(**self._tree).router.max_body_mib << 20)
        await self._meet(scheduler)
        self._tree["router"] |= {"host": self._host, "port": port}
        await self._run(0, lambda: asyncio.to_thread(healthy, f"{self._url}/health"))

    async def __call__(self, request: Request) -> Response:
        """Forward a request. If its client disconnects, Serve cancels this call, and so the router's."""
        return await self._proxy.hand_on(request)

    async def __del__(self) -> None:
        """Drain the router and end it."""
        await super().__del__()
        await self._proxy.close()


def build_pd_openai_app(args: Mapping[str, Any]) -> Any:
    """Return a Serve application: prefill and decode workers behind an OpenAI-compatible ingress.

    `args` are those of `ray.serve.llm.build_pd_openai_app`: prefill_config and decode_config, each a mapping,
    an LLMConfig or the path of a YAML file, and ingress_deployment_config. encode_config and sections of
    Baton's own configuration may be added (serve_args.py). Serve gets each deployment_config. The parts use
    TLS unless security.insecure is set. Raises ConfigError.
    """
    read = serve_args.read(args)
    settings = read.settings
    scheduler = _deployment(Scheduler, "Scheduler", {"num_cpus": 0}).bind(settings.tree_of("scheduler"))
    workers = [
        _workers(settings, role, read.options[role], scheduler)
        for role in WORKER_ROLES
        if role in read.options
    ]
    port = settings.router.port if "port" in settings.router.model_fields_set else None
    ingress = {"max_ongoing_requests": UNBOUNDED, **read.options["router"]}
    router = _deployment(Router, "Router", {"num_cpus": 0}, ingress)
    return router.bind(settings.tree_of("router"), port, scheduler, *workers)


def by_requests(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas at which each has target_ongoing_requests placed requests."""
    placed = sum((context.aggregated_metrics or {}).get(_REQUESTS, {}).values())
    wanted = math.ceil(placed / context.config.get_target_ongoing_requests())
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, wanted)), {}


def _workers(settings: ClusterSettings, role: str, options: dict[str, Any], scheduler: Any) -> Any:
    bundle, group = settings.bundle(role), settings.workers(role)
    actor: dict[str, Any] = {"num_cpus": bundle.pop("CPU", 0.0), "num_gpus": bundle.pop("GPU", 0.0)}
    actor["resources"] = bundle
    if group.label_selector:
        actor["label_selector"] = group.label_selector
    if group.runtime_env:
        actor["runtime_env"] = group.runtime_env
    if "autoscaling_config" in options:
        policy = {"policy_function": f"{__name__}:{by_requests.__name__}"}
        options["autoscaling_config"] = {"policy": policy, **options["autoscaling_config"]}
    options.setdefault("graceful_shutdown_timeout_s", settings.worker.drain_timeout_s + STOP_TIMEOUT_S)
    cores = max(1, round(actor["num_cpus"]))
    workers = _deployment(Worker, role.capitalize(), actor, options)
    return workers.bind(role, settings.tree_of(role), cores, scheduler)


def _deployment(
    kind: type, name: str, actor: dict[str, Any], options: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    given = dict(options)
    actor |= given.pop("ray_actor_options", None) or {}
    return serve.deployment(kind).options(**{"name": name, "ray_actor_options": actor, **given})
