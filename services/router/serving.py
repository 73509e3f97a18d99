"""Run a router in its process, until a signal: assemble its parts, and serve HTTP and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import uvicorn
from prometheus_client import REGISTRY
from starlette.middleware import Middleware
from starlette.routing import Route

from baton import rpc
from baton.addresses import from_here, join, split
from baton.metrics import MetricsServer, dialled
from baton.protos import scheduler_pb2
from baton.scheduler.client import SchedulerClient
from baton.scheduler.members import Member
from baton.services.classes import Classes
from baton.services.config import RouterSettings, Settings
from baton.services.engine.adapters import AdapterFiles
from baton.services.models import Model
from baton.services.router.chronicle import Chronicle
from baton.services.router.cluster import ClusterView
from baton.services.router.group import BACKLOG, Seat
from baton.services.router.http.authentication import FixedKeys, KeyMiddleware
from baton.services.router.http.connections import Connections
from baton.services.router.http.federation import Federation, Processes, route
from baton.services.router.http.limits import MAX_CONNECTIONS, HttpLimits, affordable_connections
from baton.services.router.http.server import Server
from baton.services.router.images import ImageBudget, budget_bytes
from baton.services.router.media.door import MediaDoor
from baton.services.router.metrics import RouterMetrics
from baton.services.router.ops.page import PageDoor, live_page
from baton.services.router.served import Shared, served
from baton.services.router.state import Journal, journal_bytes
from baton.services.router.tenancy import open_tenancy
from baton.services.router.vllm import frontend
from baton.services.router.vllm.frontend_args import comment_s
from baton.services.router.vllm.metrics import EngineMetrics
from baton.services.router.vllm.response_store import ResponseStore, kept_alone

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 620.0  # more than any known proxy keeps idle connections: docs/proxies.md
SLOW_CLIENT_S = 30.0  # limit for a request to arrive, and for its client to read any of the response
LAST_WORDS_S = 2.0  # time to send the last errors to clients after router.drain_timeout_s


async def run(
    settings: Settings,
    models: Sequence[Model],
    adapters: Sequence[Sequence[AdapterFiles]],
    seat: Seat,
    *,
    keys: list[str],
    store_password: str,
    page: PageDoor | None,
) -> None:
    """Serve `models`, each with its `adapters`, until a signal."""
    async with contextlib.AsyncExitStack() as stack:
        shared = _shared(settings, f"router-{uuid.uuid4().hex[:12]}")
        stack.push_async_callback(asyncio.to_thread, shared.chronicle.close)
        stack.enter_context(shared.engine_metrics)
        serving = [
            await stack.enter_async_context(served(model, files, shared, first=model is models[0]))
            for model, files in zip(models, adapters, strict=True)
        ]
        schedulers = [one.scheduler for one in serving]
        metrics = shared.metrics
        metrics.scheduler_up.set_function(lambda: all(one.answering for one in schedulers))
        metrics.watch_workers(
            lambda: [one.identity.worker_id for each in schedulers for one in each.standby.workers]
        )
        views = [one.cluster for one in serving]
        figures = stack.enter_context(_exposed(settings.router, shared.router_id, schedulers, views, seat))
        async with open_tenancy(settings, shared.router_id, metrics, store_password) as tenancy:
            door = Middleware(KeyMiddleware, keys=tenancy.keyring or FixedKeys(keys), refused=metrics.refused)
            store = ResponseStore()
            most = settings.router.max_body_mib << 20
            media = MediaDoor(settings.router.media, most, metrics.images)
            await stack.enter_async_context(media)
            metrics.image_pixels.set_function(lambda: media.pixels)
            app = frontend.opened_to_clients(
                [await one.app(media) for one in serving],
                tenancy,
                shared.chronicle,
                classes=shared.classes,
                door=door if keys or tenancy.keyring else None,
                comment_s=comment_s(settings.router),
                store=store,
            )
            await stack.enter_async_context(kept_alone(store, schedulers, shared.router_id))
            app.router.routes.insert(0, figures)

            def end_all() -> None:
                for one in serving:
                    one.client.end_all()

            name = seat.named(shared.router_id)
            async with live_page(page, settings, name, serving, shared.chronicle):
                await _serve_http(app, seat, settings, metrics.refused, end_all)


def _shared(settings: Settings, router_id: str) -> Shared:
    traces = None
    if settings.tracing.endpoint:
        from baton.services.router.tracing import Traces, open_exporter

        slow_s = 2e-3 * settings.slo.ttft_ms
        traces = Traces(settings.tracing, open_exporter(settings.tracing), router_id, slow_s=slow_s)
    metrics = RouterMetrics()
    images = ImageBudget(budget_bytes(settings.router.processes))
    journal = Journal(journal_bytes(settings.router.processes), images)
    metrics.journal_bytes.set_function(lambda: journal.size + images.size)
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

        processes = None if seat.alone else Processes(seat.number, group)
        yield route(Federation(me, REGISTRY, members, processes))


async def _serve_http(
    app: Any, seat: Seat, settings: Settings, refused: Callable[[str], None], end_all: Callable[[], None]
) -> None:
    """Serve until a signal, then drain: streams have router.drain_timeout_s to end.

    After that, or at a second Ctrl-C, `end_all` ends them.
    """
    router = settings.router
    limits = HttpLimits(
        max_body=router.max_body_mib << 20,
        max_connections=affordable_connections(MAX_CONNECTIONS),
        slow_client_s=SLOW_CLIENT_S,
        keep_alive_s=KEEP_ALIVE_S,
    )
    config = uvicorn.Config(
        app,
        http=cast(Any, Connections(limits, refused)),  # uvicorn declares a class here, but only calls it
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
