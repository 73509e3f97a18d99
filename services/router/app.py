"""Run a router's process: `run_router` assembles its parts and serves.

services/fleet/routers.py runs a router of several processes (router.processes).
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
from baton.security.names import Role
from baton.services import credentials, identities, logs
from baton.services.classes import Classes
from baton.services.config import Settings
from baton.services.engine.adapters import AdapterFiles, read_adapters
from baton.services.engine.args import check_model, check_version
from baton.services.engine.isolation import RESPONSES_STORE, is_set
from baton.services.errors import ConfigError, StartError
from baton.services.imports import collect_seldom, import_all
from baton.services.leave import leave_on_signals
from baton.services.models import Model, models_of
from baton.services.router.group import Group, Seat
from baton.services.router.ops.page import PageDoor, Shown, live_page, open_door
from baton.services.router.vllm import HEAVY_IMPORTS
from baton.services.router.vllm.frontend_args import check_names

if TYPE_CHECKING:
    from baton.services.router.served import Shared

log = logging.getLogger(__name__)

SLOW_CLIENT_S = 30.0  # for a request to come whole, and for a client to read anything of its response
LAST_WORDS_S = 2.0  # to send the last errors to clients whose time is up
_BACKLOG = 2048


def preload() -> None:
    """Import all slow modules. Safe before a fork: starts no thread and no event loop."""
    import_all(HEAVY_IMPORTS)


@dataclass(frozen=True)
class Opened:
    """What a router has before its slow imports: keys, listening sockets, and the adapters' files."""

    keys: list[str]
    store_password: str
    group: Group
    page: PageDoor | None
    adapters: Sequence[Sequence[AdapterFiles]]  # per model, in the models' order


def run_router(settings: Settings, models: Sequence[Model] | None = None) -> None:
    """Serve OpenAI's API for `models` (those of the settings if None) until SIGTERM or SIGINT.

    Raises ConfigError, StartError or SecurityError with one line: the port is taken, a model is missing, vLLM
    has another version. A router also starts without a scheduler: requests get 503 until one answers.
    """
    models = models or models_of(settings)
    with opened(settings, models, 1) as router:
        identities.take_on(settings, Role.ROUTER)
        leave_on_signals(
            0
        )  # until the server handles them: importing takes seconds, and there is nothing to clean up yet
        preload()
        serve(settings, models, router, 0)


@contextlib.contextmanager
def opened(settings: Settings, models: Sequence[Model], processes: int) -> Iterator[Opened]:
    """Check the settings, and listen inside the block with a socket per process.

    Raises ConfigError and StartError as `run_router` does.
    """
    log_as(settings, "router")
    if processes > 1 and is_set(RESPONSES_STORE):
        raise ConfigError(
            f"router.processes: value {processes} is not allowed with the variable {RESPONSES_STORE}, as "
            "responses are stored in one process's memory: set it to 1, or unset the variable"
        )
    for one in models:
        check_model(one.settings.engine)
        check_names(one.settings.router)
        one.settings.scheduler.check_shared()
    check_version()
    adapters = [read_adapters(one.settings.engine) for one in models]
    keys = credentials.api_keys(settings.router)
    if warning := credentials.open_to_all(settings.router):
        log.warning("router.host: %s", warning)
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


def serve(settings: Settings, models: Sequence[Model], router: Opened, number: int) -> None:
    """Run process `number` of a router until a signal. Call `preload` first."""
    import uvloop

    collect_seldom()
    uvloop.run(_serve(settings, models, router, Seat(router.group, number)))


async def _serve(settings: Settings, models: Sequence[Model], router: Opened, seat: Seat) -> None:
    from starlette.middleware import Middleware

    from baton.services.router.alone import kept_alone
    from baton.services.router.exposed import exposed
    from baton.services.router.http.authentication import FixedKeys, KeyMiddleware
    from baton.services.router.served import served
    from baton.services.router.tenancy import open_tenancy
    from baton.services.router.vllm import frontend
    from baton.services.router.vllm.frontend_args import comment_s
    from baton.services.router.vllm.response_store import ResponseStore

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
        figures = stack.enter_context(exposed(settings.router, shared.router_id, schedulers, views, seat))
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
    from baton.services.router.chronicle import Chronicle
    from baton.services.router.journal import Journal
    from baton.services.router.metrics import RouterMetrics
    from baton.services.router.served import Shared
    from baton.services.router.vllm.metrics import EngineMetrics

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
    import uvicorn

    from baton.services.router.http.connections import connections
    from baton.services.router.http.descriptors import affordable_connections
    from baton.services.router.http.objections import HttpLimits
    from baton.services.router.http.server import Server

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
        backlog=_BACKLOG,
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
            sockets.pop().close()  # it failed if the port was taken; sockets with SO_REUSEPORT do not
            sockets = [listen(host, port, _BACKLOG, shared=True) for _ in range(processes)]
    except OSError as error:
        raise StartError(
            f"router.port: cannot listen on {join(host, port)}: {error.strerror or error}; choose another "
            "port or end the process that uses it"
        ) from None
    for sock in sockets:
        sock.setblocking(False)  # another process may be quicker to accept
    return sockets
