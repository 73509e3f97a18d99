"""A router's process: `run_router` puts its parts together and serves.

One of several (router.processes) is run by services/fleet/routers.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from baton.addresses import join, listen
from baton.protos import worker_pb2
from baton.scheduler.client import SchedulerClient
from baton.scheduler.tasks import spawn, stop
from baton.scheduler.types import Adapter
from baton.security.names import Role
from baton.services import credentials, identities, logs
from baton.services.classes import Classes
from baton.services.config import Settings
from baton.services.engine.adapters import AdapterFiles, read_adapters
from baton.services.engine.args import VLLM_VERSION, check_model, check_version, served_model_name
from baton.services.errors import StartError
from baton.services.imports import collect_seldom, import_all
from baton.services.leave import leave_on_signals
from baton.services.router.cluster import ClusterView
from baton.services.router.group import Group, Seat
from baton.services.router.ops.page import PageDoor, Shown, live_page, open_door
from baton.services.router.vllm import HEAVY_IMPORTS
from baton.services.router.vllm.frontend_args import check_names

if TYPE_CHECKING:
    from baton.services.router.relay import RelayParts

log = logging.getLogger(__name__)

# Idle connections are kept longer than load balancers and clients usually keep theirs (60 s), so that these
# close them: a request that crosses our own closing is lost.
KEEP_ALIVE_S = 75
LAST_WORDS_S = 2.0  # to send the last errors to clients whose time is up
_BACKLOG = 2048


def preload() -> None:
    """Import all that takes seconds. For a process that forks routers: it starts no thread and no loop."""
    import_all(HEAVY_IMPORTS)


@dataclass(frozen=True)
class Opened:
    """A router before anything slow: keys, the sockets at which clients wait, and the adapters' files."""

    keys: list[str]
    store_password: str
    group: Group
    page: PageDoor | None
    adapters: Sequence[AdapterFiles]


def run_router(settings: Settings) -> None:
    """Serve OpenAI's API in this process, until SIGTERM or SIGINT.

    Raises ConfigError, StartError or SecurityError with one line: the port is taken, the model is missing,
    vLLM has another version. A router starts without a scheduler, too: requests get 503 until one answers.
    """
    with opened(settings, 1) as router:
        identities.take_on(settings, Role.ROUTER)
        leave_on_signals(0)  # until the server handles them: importing takes seconds, and holds nothing yet
        preload()
        serve(settings, router, 0)


@contextlib.contextmanager
def opened(settings: Settings, processes: int) -> Iterator[Opened]:
    """Check the settings and listen, for so many processes, inside the block.

    Raises ConfigError and StartError as `run_router` does.
    """
    log_as(settings, "router")
    check_model(settings.engine)
    check_names(settings.router)
    settings.scheduler.check_shared()
    check_version()
    adapters = read_adapters(settings.engine)
    keys = credentials.api_keys(settings.router)
    if settings.router.keys_file:
        credentials.check_book(settings.router.keys_file)
    store_password = credentials.keys_store_password(settings.router)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(contextlib.closing(one)) for one in _listen(settings, processes)]
        page = open_door(settings)
        if page is not None:
            stack.enter_context(contextlib.closing(page.sock))
        yield Opened(keys, store_password, Group(sockets), page, adapters)


def log_as(settings: Settings, process: str) -> None:
    """Configure the logs of a router's process."""
    level = settings.router.log_level.upper()
    logs.configure(settings.log_format, process, libraries="ERROR" if level == "WARNING" else level)
    logging.getLogger("baton.requests").setLevel(level)


def serve(settings: Settings, router: Opened, number: int) -> None:
    """Be process `number` of a router until a signal. To be called once `preload` was."""
    import uvloop

    collect_seldom()
    uvloop.run(_serve(settings, router, Seat(router.group, number)))


async def _serve(settings: Settings, router: Opened, seat: Seat) -> None:
    from starlette.middleware import Middleware

    from baton.services.engine import wire
    from baton.services.router.exposed import exposed
    from baton.services.router.http.authentication import FixedKeys, KeyMiddleware
    from baton.services.router.metrics import RouterMetrics
    from baton.services.router.pool import WorkerPool
    from baton.services.router.tenancy import open_tenancy
    from baton.services.router.vllm import frontend
    from baton.services.router.vllm.engine_client import RelayClient, RelayLimits

    router_id = f"router-{uuid.uuid4().hex[:12]}"
    own = settings.scheduler
    scheduler = SchedulerClient(own.address, router_id=router_id, policy=own.policy)
    hello = worker_pb2.HelloRequest(
        router_id=router_id,
        vllm_version=VLLM_VERSION,
        model=served_model_name(settings.engine),
        protocol=wire.PROTOCOL,
    )
    pool = WorkerPool(hello, wire.decode_outputs, settings.scheduler.worker_lease_s)
    metrics = RouterMetrics()
    metrics.watch_scheduler(lambda: scheduler.answering)
    cluster = ClusterView(scheduler, own.worker_lease_s, pool.reached, metrics.scheduler_lost)
    try:
        config = frontend.build_config(settings)
        args = frontend.build_arguments(settings, config)
        parts = _parts(settings, scheduler, pool, metrics, router_id)
        cluster.tell(lambda: parts.counts.message(parts.waiting))
        limits = RelayLimits(
            request_timeout_s=settings.router.request_timeout_s,
            max_model_len=config.model_config.max_model_len,
            adapters={one.name: Adapter(one.name, one.fingerprint) for one in router.adapters},
            flush_s=settings.router.flush_ms / 1e3,
        )
        client = RelayClient(parts, limits)
        shown = Shown(seat.named(router_id), scheduler, cluster, parts, lambda: client.live)
        llm = frontend.RelayLLM(config, client, cluster, settings.engine)
        watching = spawn(cluster.watch(), "snapshots of the cluster")
        learning = asyncio.create_task(_learn(llm, cluster), name="learn the model's limits")
        stack = contextlib.ExitStack()
        try:
            figures = stack.enter_context(
                exposed(settings.router, router_id, scheduler, cluster.members, seat)
            )
            async with open_tenancy(settings, router_id, metrics, router.store_password) as tenancy:
                door = Middleware(
                    KeyMiddleware,
                    keys=tenancy.keyring or FixedKeys(router.keys),
                    metrics_open=settings.router.metrics_open,
                    refused=metrics.refused,
                )
                needs_key = router.keys or tenancy.keyring
                app = await frontend.build_http_app(
                    llm,
                    args,
                    settings.router.max_sequences,
                    tenancy,
                    parts.chronicle,
                    classes=Classes(settings.classes),
                    door=door if needs_key else None,
                )
                app.router.routes.insert(0, figures)
                async with live_page(None if seat.number else router.page, settings, shown):
                    await _serve_http(app, seat, settings, metrics.refused, client.end_all)
        finally:
            stack.close()
            learning.cancel()
            await stop(watching)
            llm.shutdown()
            await asyncio.to_thread(parts.chronicle.close)
    finally:
        await pool.close()
        await scheduler.close()


def _parts(
    settings: Settings, scheduler: SchedulerClient, pool: Any, metrics: Any, router_id: str
) -> RelayParts:
    """Make what all requests of this router share."""
    from baton.services.router.chronicle import Chronicle
    from baton.services.router.journal import Journal
    from baton.services.router.placement import Placements
    from baton.services.router.relay import RelayParts
    from baton.services.router.waiting import WaitingRoom

    traces = None
    if settings.tracing.endpoint:
        from baton.services.router.tracing import Traces, open_exporter

        traces = Traces(settings.tracing, open_exporter(settings.tracing), router_id)
    router = settings.router
    journal = Journal(router.journal_mib << 20)
    metrics.watch_journal(journal)
    metrics.watch_workers(lambda: [one.identity.worker_id for one in scheduler.standby.workers])
    waiting = WaitingRoom(router.max_waiting, router.max_wait_s, metrics, Classes(settings.classes))
    scheduler.reporter.on_released = waiting.freed
    return RelayParts(
        Placements(scheduler, metrics),
        pool,
        metrics,
        router.max_attempts,
        waiting,
        router.replace_wait_s,
        journal,
        chronicle=Chronicle(metrics, traces, served_model_name(settings.engine)),
    )


async def _learn(llm: Any, cluster: ClusterView) -> None:
    """Take the model's limits from the first ready worker. The configuration's count until then."""
    llm.learn(await cluster.first_capacity())


async def _serve_http(
    app: Any,
    seat: Seat,
    settings: Settings,
    refused: Callable[[str], None],
    end_all: Callable[[], None],
) -> None:
    """Serve until a signal. Then accept nothing, and let streams end within router.drain_timeout_s.

    `end_all` ends those that are left; a second Ctrl-C ends them at once.
    """
    import uvicorn

    from baton.services.router.http.connections import HttpLimits, affordable_connections, connections
    from baton.services.router.http.server import Server

    router = settings.router
    limits = HttpLimits(
        max_body=router.max_body_mib << 20,
        max_connections=affordable_connections(router.max_connections),
        slow_client_s=router.slow_client_s,
    )
    config = uvicorn.Config(
        app,
        http=cast(Any, connections(limits, refused)),  # declared as a class, but only called
        ws="none",
        log_config=None,
        log_level=settings.router.log_level,
        access_log=settings.router.log_level == "debug",
        backlog=_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.router.drain_timeout_s + LAST_WORDS_S),
    )
    server = Server(config, seat, router.drain_timeout_s, end_all)
    app.state.server = server
    log.info("router %d listens on http://%s", os.getpid(), join(*seat.sock.getsockname()[:2]))
    await server.serve(sockets=[seat.sock])


def _listen(settings: Settings, processes: int) -> list[socket.socket]:
    """Bind and listen before anything slow: early clients wait instead of being refused."""
    host, port = settings.router.host, settings.router.port
    try:
        sockets = [listen(host, port, _BACKLOG)]
        if processes > 1:
            port = sockets[0].getsockname()[1]
            sockets.pop().close()  # nobody else has it: sockets that share a port would not notice
            sockets = [listen(host, port, _BACKLOG, shared=True) for _ in range(processes)]
    except OSError as error:
        raise StartError(
            f"router.port: cannot listen on {join(host, port)}: {error.strerror or error}; choose another "
            "port or end the process that uses it"
        ) from None
    for sock in sockets:
        sock.setblocking(False)  # others may be quicker to accept
    return sockets
