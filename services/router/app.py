"""Run a router's process: check the settings, open the sockets, then let serving.py assemble the parts.

services/fleet/routers.py runs a router with several processes (router.processes).
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.addresses import join, listen
from baton.security.names import Role
from baton.services import credentials, identities, logs
from baton.services.config import Settings
from baton.services.engine.adapters import AdapterFiles, read_adapters
from baton.services.engine.args import check_model, check_version
from baton.services.engine.isolation import RESPONSES_STORE, is_set
from baton.services.errors import ConfigError, StartError
from baton.services.imports import collect_seldom, import_all
from baton.services.leave import leave_on_signals
from baton.services.models import Model, models_of
from baton.services.router.group import BACKLOG, Group, Seat
from baton.services.router.ops.page import PageDoor, open_door
from baton.services.router.vllm import HEAVY_IMPORTS
from baton.services.router.vllm.frontend_args import check_names

log = logging.getLogger(__name__)


def preload() -> None:
    """Import all slow modules. Safe before a fork: starts no thread and no event loop."""
    import_all(HEAVY_IMPORTS)


@dataclass(frozen=True)
class Opened:
    """The router before its slow imports: keys, listening sockets, and the adapters' files."""

    keys: list[str]
    store_password: str
    group: Group
    page: PageDoor | None
    adapters: Sequence[Sequence[AdapterFiles]]  # per model, in the models' order


def run_router(settings: Settings, models: Sequence[Model] | None = None) -> None:
    """Serve OpenAI's API for `models` (if None, those in the settings) until SIGTERM or SIGINT.

    Raises ConfigError, StartError or SecurityError with a one-line message, for example if the port is
    taken, a model is missing or vLLM has another version. A router also starts without a scheduler: requests
    get 503 until a scheduler answers.
    """
    models = models or models_of(settings)
    with opened(settings, models, 1) as router:
        identities.take_on(settings, Role.ROUTER)
        leave_on_signals(0)  # until the server handles signals: the imports take seconds
        preload()
        serve(settings, models, router, 0)


@contextlib.contextmanager
def opened(settings: Settings, models: Sequence[Model], processes: int) -> Iterator[Opened]:
    """Check the settings; inside the block, listen with one socket per process.

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
    level = settings.router.log_level.upper()
    logs.configure(settings.log_format, process, libraries="ERROR" if level == "WARNING" else level)
    logging.getLogger("baton.requests").setLevel(level)


def serve(settings: Settings, models: Sequence[Model], router: Opened, number: int) -> None:
    """Run process `number` of a router until a signal. Call `preload` first."""
    import uvloop

    from baton.services.router.serving import run

    collect_seldom()
    seat = Seat(router.group, number)
    page = None if number else router.page
    password = router.store_password
    uvloop.run(
        run(settings, models, router.adapters, seat, keys=router.keys, store_password=password, page=page)
    )


def _listen(settings: Settings, processes: int) -> list[socket.socket]:
    """Bind and listen before anything slow: early clients wait instead of being refused."""
    host, port = settings.router.host, settings.router.port
    try:
        sockets = [listen(host, port, BACKLOG)]
        if processes > 1:
            port = sockets[0].getsockname()[1]
            sockets.pop().close()  # its `listen` fails if the port is taken; with SO_REUSEPORT it would not
            sockets = [listen(host, port, BACKLOG, shared=True) for _ in range(processes)]
    except OSError as error:
        raise StartError(
            f"router.port: cannot listen on {join(host, port)}: {error.strerror or error}; choose another "
            "port or end the process that uses it"
        ) from None
    return sockets
