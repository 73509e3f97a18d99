"""The live page within a router: its socket, its content and what it may do."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from baton import addresses
from baton.autoscale.loads import summed
from baton.security.exposure import only_from_here
from baton.services import credentials
from baton.services.config import Settings
from baton.services.engine.args import VLLM_VERSION
from baton.services.errors import ConfigError, StartError

if TYPE_CHECKING:
    from baton.services.router.chronicle import Chronicle
    from baton.services.router.served import Served

_NO_OPERATOR = (
    "With security.tls a router's certificate does not let it drain workers or change their roles: use "
    "`baton drain`, `baton undrain` and `baton role` with an operator's certificate."
)


@dataclass(frozen=True)
class PageDoor:
    """The page's listening socket, and its key ("" if it has none)."""

    sock: socket.socket
    key: str


def open_door(settings: Settings) -> PageDoor | None:
    """Listen for the page; return None if `ops.listen` is empty.

    Raises ConfigError if other machines could reach it without a key, StartError if the port is taken.
    """
    where = settings.ops.listen
    if not where:
        return None
    key = credentials.page_key(settings.ops)
    host, port = addresses.split(where)
    if not key and not only_from_here(host):
        raise ConfigError(
            f"ops.listen: {where} can be reached from other machines, which could see requests and drain "
            "workers: set ops.key"
        )
    try:
        return PageDoor(addresses.listen(host, port), key)
    except OSError as error:
        raise StartError(
            f"ops.listen: cannot listen on {where}: {error.strerror or error}; choose another address, or "
            "leave it empty for no page"
        ) from None


@contextlib.asynccontextmanager
async def live_page(
    door: PageDoor | None, settings: Settings, router_id: str, served: Sequence[Served], chronicle: Chronicle
) -> AsyncIterator[None]:
    """Serve a page about all models inside the block; do nothing if `door` is None."""
    if door is None:
        yield
        return
    from baton.services.router.ops import server
    from baton.services.router.ops.access import PageAccess
    from baton.services.router.ops.feed import Feed, Series
    from baton.services.router.ops.server import Actions

    def problem() -> str:
        """Return which models' schedulers do not answer, and why; "" if all do."""
        problems = {one.model.name: one.cluster.problem for one in served if one.cluster.problem}
        if len(served) == 1:
            return next(iter(problems.values()), "")
        return "; ".join(f"{name}: {text}" for name, text in problems.items())

    forbidden = _NO_OPERATOR if settings.security.tls else ""
    about = {
        "model": ", ".join(one.model.name for one in served),
        "topic": settings.scheduler.topic,
        "router": router_id,
        "version": f"Baton {version('baton')}, vLLM {VLLM_VERSION}",
        "forbidden": forbidden,
    }
    series = Series(
        lambda: summed(one.parts.counts.message(one.parts.waiting) for one in served),
        lambda: sum(one.client.live for one in served),
    )
    feed = Feed(
        about, lambda: [worker for one in served for worker in one.scheduler.standby.workers], problem, series
    )
    chronicle.listeners.append(feed.over)
    actions = Actions([one.scheduler for one in served], feed.events, forbidden)
    app = server.build_app(feed, chronicle.recent, actions, PageAccess(door.key))
    async with server.serving(app, feed, door.sock):
        yield
