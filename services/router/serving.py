"""Assemble a router's parts and serve: HTTP, and for each model a cluster view, streams and a front end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import uuid
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from prometheus_client import REGISTRY
from starlette.middleware import Middleware
from starlette.routing import Route

from baton import rpc
from baton.addresses import from_here, join, split
from baton.keeping import keep
from baton.levels import set_level
from baton.metrics import MetricsServer, dialled
from baton.protos import scheduler_pb2, worker_pb2
from baton.scheduler.client import SchedulerClient
from baton.scheduler.members import Member
from baton.scheduler.need import Adapter
from baton.services.classes import Classes
from baton.services.config import RouterSettings, Settings
from baton.services.engine import wire
from baton.services.engine.adapters import AdapterFiles
from baton.services.engine.args import VLLM_VERSION
from baton.services.engine.step_checks import StepLimits
from baton.services.models import Model
from baton.services.router.alone import kept_alone
from baton.services.router.app import BACKLOG, Opened
from baton.services.router.chronicle import Chronicle
from baton.services.router.cluster import ClusterView
from baton.services.router.group import Seat
from baton.services.router.http.authentication import FixedKeys, KeyMiddleware
from baton.services.router.http.connections import connections
from baton.services.router.http.descriptors import affordable_connections
from baton.services.router.http.federation import Beside, Federation, route
from baton.services.router.http.objections import HttpLimits
from baton.services.router.http.server import Server
from baton.services.router.metrics import RouterMetrics
from baton.services.router.ops.page import Shown, live_page
from baton.services.router.placement import Placements
from baton.services.router.pool import WorkerPool
from baton.services.router.relay import RelayParts
from baton.services.router.state import Journal
from baton.services.router.suspects import Convicts
from baton.services.router.tenancy import open_tenancy
from baton.services.router.vllm import frontend, prints
from baton.services.router.vllm.engine_client import RelayClient, RelayLimits
from baton.services.router.vllm.frontend_args import comment_s
from baton.services.router.vllm.metrics import EngineMetrics
from baton.services.router.vllm.response_store import ResponseStore
from baton.services.router.waiting import WaitingRoom
from baton.tasks import stop

log = logging.getLogger(__name__)

SLOW_CLIENT_S = 30.0  # limit for a request to arrive, and for its client to read anything of the response
LAST_WORDS_S = 2.0  # time to send the last errors to clients after router.drain_timeout_s


@dataclass(frozen=True)
class Shared:
    """The parts of a router that its models share."""

    router_id: str
    metrics: RouterMetrics
    engine_metrics: EngineMetrics
    journal: Journal
    chronicle: Chronicle
    classes: Classes


@dataclass(frozen=True)
class Served:
    """The parts of a router for one model."""

    model: Model
    scheduler: SchedulerClient
    cluster: ClusterView
    parts: RelayParts
    client: RelayClient
    llm: frontend.RelayLLM
    args: Namespace  # vLLM's app's

    async def app(self) -> frontend.ModelApp:
        return frontend.ModelApp(await frontend.build_model_app(self.llm, self.args), self.model.names)


@contextlib.asynccontextmanager
async def served(
    model: Model, adapters: Sequence[AdapterFiles], shared: Shared, *, first: bool
) -> AsyncIterator[Served]:
    """Serve a model inside the block. Raises ConfigError and StartError.

    The `first` model's scheduler sets this process's log level.
    """
    own, router, metrics = model.settings.scheduler, model.settings.router, shared.metrics
    scheduler = SchedulerClient(own.address, router_id=shared.router_id, policy=own.policy)
    hello = worker_pb2.HelloRequest(
        router_id=shared.router_id, vllm_version=VLLM_VERSION, model=model.name, protocol=wire.PROTOCOL
    )
    pool = WorkerPool(hello, wire.decode_outputs, own.worker_lease_s)
    cluster = ClusterView(
        scheduler,
        own.worker_lease_s,
        pool.reached,
        metrics.scheduler_losses.inc,
        set_level if first else lambda _: None,
    )
    metrics.ready_workers.labels(model.name).set_function(cluster.ready)
    try:
        config = frontend.build_config(model.settings)
        args = frontend.build_arguments(model.settings, config)
        waiting = WaitingRoom(router.max_waiting, router.max_wait_s, metrics, shared.classes)
        scheduler.reporter.on_released = waiting.freed
        parts = RelayParts(
            Placements(scheduler, metrics, model.name if model.entry is not None else "", cluster.chosen),
            pool,
            metrics,
            waiting,
            router.replace_wait_s,
            shared.journal,
            chronicle=shared.chronicle,
            convicts=Convicts(prints.digest, prints.shape),
        )
        cluster.tell(lambda: parts.counts.message(waiting))
        limits = RelayLimits(
            request_timeout_s=router.request_timeout_s,
            max_model_len=config.model_config.max_model_len,
            steps=StepLimits(config.model_config.get_vocab_size()),
            model=model.name,
            adapters={one.name: Adapter(one.name, one.fingerprint) for one in adapters},
            flush_s=router.flush_ms / 1e3,
        )
        client = RelayClient(parts, limits)
        llm = frontend.RelayLLM(config, client, cluster, model.settings.engine, shared.engine_metrics)
        watching = keep(cluster.watch, f"snapshots of {model.name}'s cluster")
        learning = keep(partial(_learn, llm, cluster), f"learn the limits of {model.name}")
        try:
            yield Served(model, scheduler, cluster, parts, client, llm, args)
        finally:
            learning.cancel()
            await stop(watching)
            llm.shutdown()
    finally:
        await pool.close()
        await scheduler.close()


async def _learn(llm: frontend.RelayLLM, cluster: ClusterView) -> None:
    """Take the model's limits from the first ready worker. Until then those of the configuration apply."""
    llm.learn(await cluster.first_capacity())


async def run(settings: Settings, models: Sequence[Model], router: Opened, seat: Seat) -> None:
    async with contextlib.AsyncExitStack() as stack:
        shared = _shared(settings, f"router-{uuid.uuid4().hex[:12]}")
        stack.push_async_callback(asyncio.to_thread, shared.chronicle.close)
        stack.enter_context(shared.engine_metrics)
        serving = [
            await stack.enter_async_context(served(model, adapters, shared, first=model is models[0]))
            for model, adapters in zip(models, router.adapters, strict=True)
        ]
        schedulers = [one.scheduler for one in serving]
        metrics = shared.metrics
        metrics.scheduler_up.set_function(lambda: all(one.answering for one in schedulers))
        metrics.watch_workers(
            lambda: [one.identity.worker_id for each in schedulers for one in each.standby.workers]
        )
        views = [one.cluster for one in serving]
        figures = stack.enter_context(_exposed(settings.router, shared.router_id, schedulers, views, seat))
        async with open_tenancy(settings, shared.router_id, metrics, router.store_password) as tenancy:
            door = Middleware(
                KeyMiddleware,
                keys=tenancy.keyring or FixedKeys(router.keys),
                refused=metrics.refused,
            )
            store = ResponseStore()
            app = frontend.opened_to_clients(
                [await one.app() for one in serving],
                tenancy,
                shared.chronicle,
                classes=shared.classes,
                door=door if router.keys or tenancy.keyring else None,
                comment_s=comment_s(settings.router),
                store=store,
            )
            await stack.enter_async_context(kept_alone(store, schedulers, shared.router_id))
            app.router.routes.insert(0, figures)

            def end_all() -> None:
                for one in serving:
                    one.client.end_all()

            shown = Shown(seat.named(shared.router_id), serving, shared.chronicle)
            async with live_page(None if seat.number else router.page, settings, shown):
                await _serve_http(app, seat, settings, metrics.refused, end_all)


def _shared(settings: Settings, router_id: str) -> Shared:
    traces = None
    if settings.tracing.endpoint:
        from baton.services.router.tracing import Traces, open_exporter

        traces = Traces(settings.tracing, open_exporter(settings.tracing), router_id)
    metrics = RouterMetrics()
    journal = Journal(settings.router.journal_mib << 20)
    metrics.journal_bytes.set_function(lambda: journal.size)
    return Shared(
        router_id, metrics, EngineMetrics(), journal, Chronicle(metrics, traces), Classes(settings.classes)
    )


@contextlib.contextmanager
def _exposed(
    settings: RouterSettings,
    router_id: str,
    schedulers: Iterable[SchedulerClient],
    views: Iterable[ClusterView],
    seat: Seat,
) -> Iterator[Route]:
    """Serve metrics on a separate port without an API key, and register it with the schedulers.

    Yields the route of /metrics, which federates the metrics of all processes in `views`. Raises CannotServe.
    """
    host = join(settings.host, settings.port)
    with MetricsServer(REGISTRY, "router.metrics_port", host, settings.metrics_port) as server:
        me = Member(router_id, "router", rpc.host_id(), server.reached_at(split(dialled(host))[0]))
        for client in schedulers:
            client.process = scheduler_pb2.Process(
                id=me.id, kind=me.role, host=me.host, metrics_address=me.address
            )
        log.info("metrics on http://%s/metrics", server.address)
        own_host, port = split(server.address)
        seat.group.tell_metrics_port(seat.number, port)

        def group() -> dict[int, str]:
            ports = seat.group.metrics_ports()
            return {number: from_here(join(own_host, port)) for number, port in ports.items()}

        def members() -> Iterable[Member]:
            # Routers appear in each model's view.
            return {member.id: member for view in views for member in view.members()}.values()

        beside = None if seat.alone else Beside(seat.number, group)
        yield route(Federation(me, REGISTRY, members, beside))


async def _serve_http(
    app: Any,
    seat: Seat,
    settings: Settings,
    refused: Callable[[str], None],
    end_all: Callable[[], None],
) -> None:
    """Serve until a signal, then drain: streams have router.drain_timeout_s to end.

    After that, or at a second Ctrl-C, `end_all` ends them.
    """
    router = settings.router
    limits = HttpLimits(
        max_body=router.max_body_mib << 20,
        max_connections=affordable_connections(router.max_connections),
        slow_client_s=SLOW_CLIENT_S,
        keep_alive_s=router.keep_alive_s,
    )
    config = uvicorn.Config(
        app,
        http=cast(Any, connections(limits, refused)),  # declared as a class, but only called
        ws="none",
        log_config=None,
        log_level=settings.router.log_level,
        access_log=settings.router.log_level == "debug",
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.router.drain_timeout_s + LAST_WORDS_S),
    )
    server = Server(config, seat, router.drain_timeout_s, end_all)
    app.state.server = server
    log.info("router %d listens on http://%s", os.getpid(), join(*seat.sock.getsockname()[:2]))
    await server.serve(sockets=[seat.sock])
